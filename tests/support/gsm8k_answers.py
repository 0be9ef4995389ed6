"""Answers to word problems as models write them: text, the right number, and whether an examiner would accept it."""

# A tuple in place of a text: the completion was cut off by the length limit.
CUT = {"finish_reason": "length"}

RIGHT: list[tuple[str | tuple[str, dict[str, str]], str]] = [
    # marks
    ("#### 72", "72"), ("####72", "72"), ("#### **72**", "72"), ("####\n72", "72"), ("#### $72$", "72"),
    ("#### The answer is 72", "72"), ("#### 72 apples", "72"), ("#### 72 for 3 apples", "72"),
    ("#### 10\nThat is wrong.\n#### 72", "72"), ("#### 72\nCheck: 72 / 2 = 36", "72"), ("#### 48 + 24 = 72", "72"),
    ("#### Step 2: add 48 and 24\nThe answer is 72", "72"), ("#### 1. Add\n48 + 24 = 72", "72"),
    (r"#### \boxed{72}", "72"), (r"#### \(72\)", "72"), ("#### x = 72", "72"), ("#### -5", "-5"), ("#### - 5", "-5"),
    # boxes
    (r"\boxed{72}", "72"), (r"so it is $\boxed{72}$.", "72"),
    (r"\boxed{72} because 3 * 24 = 72 and 4 * 18 = 72, see 9", "72"),
    (r"first \boxed{10}, no: \boxed{72}", "72"), (r"\boxed{\text{72 dollars}}", "72"),
    (r"\boxed{72\text{ km}}", "72"),
    (r"\boxed{\$72}", "72"), (r"\boxed{x = 72}", "72"), (r"\boxed 72", "72"), (r"\fbox{72}", "72"),
    (r"\boxed{1{,}234}", "1234"), (r"\boxed{1,234}", "1234"), (r"\boxed{1\,234}", "1234"), (r"\boxed{-5}", "-5"),
    (r"\boxed{\frac{1}{2}}", "0.5"), (r"\boxed{\dfrac{3}{4}}", "0.75"), (r"\boxed{-\frac{1}{2}}", "-0.5"),
    (r"\boxed{2\frac{1}{2}}", "2.5"), (r"\boxed{\frac12}", "0.5"), (r"\boxed{\frac{144}{2}}", "72"),
    (r"\boxed{2^3}", "8"), (r"\boxed{\sqrt{25}}", "5"), (r"\boxed{3 \times 24}", "72"), (r"\boxed{8 \cdot 9}", "72"),
    (r"\boxed{45^\circ}", "45"), (r"\boxed{25\%}", "25"), (r"\boxed{72}\boxed{72}", "72"), (r"\boxed{ 72 }", "72"),
    (r"\boxed{\mathbf{72}}", "72"), (r"The answer is $\boxed{\$1{,}234.50}$.", "1234.5"),
    # sentences
    ("The answer is 72.", "72"), ("The final answer is: 72", "72"), ("**Answer:** 72", "72"),
    ("Answer: $72.00", "72"),
    ("The answer to the problem is 72 clips.", "72"), ("The answer should be 72", "72"), ("ANSWER = 72", "72"),
    ("The answer is:\n\n72", "72"), ("So 72 is the answer. There were 3 days.", "72"), ("answer: 48 + 24 = 72", "72"),
    ("The answer is 10. Wait, actually it is 72.", "72"), ("The answer is 72, as 48 + 24 = 72.", "72"),
    ("The answer is not 71 but 72.", "72"), ("The answer is 72 (seventy-two).", "72"),
    ("The answer is about 72", "72"),
    ("\u7b54\u6848\u662f72\u3002", "72"), ("The answer is 72 dollars and 50 cents.", "72.5"),
    ("The answer is 72. In the end she has 3 friends", "72"), ("The answer is 72 or so.", "72"),
    # last numbers
    ("48 + 24 = 72", "72"), ("She sold 72", "72"), ("it costs 72 ... . ,", "72"), ("so x=-5", "-5"), ("10-5", "5"),
    ("pages 3\u20135", "5"), ("x = \u22125", "-5"), ("It took 2 or 3 tries, and it is 72", "72"), ("= **72**", "72"),
    ("3 + 69 = _72_.", "72"), ("<answer>72</answer>", "72"), ("3 + 69 = <b>72</b>", "72"), ("It has 72 cm^2.", "72"),
    ("The 3 fields have 72 m\u00b2 in all", "72"), (r"It holds $72\,\text{m}^3$.", "72"),
    # forms of numbers
    ("#### 72.0", "72"), ("#### 72.00.", "72"), ("#### 1,234.00", "1234"), ("#### 1,23,456", "123456"),
    ("#### .5", "0.5"),
    ("#### $1,234", "1234"), ("#### -$5", "-5"), ("#### $-5", "-5"), ("#### \u20ac72", "72"), ("#### \u00a372", "72"),
    ("#### US$72", "72"), ("#### 72 USD", "72"), ("#### 72%", "72"), ("#### 50%", "0.5"), ("#### 72km", "72"),
    ("#### 72 m/s", "72"), ("#### 72 cm^2", "72"), ("#### 72\u00b0C", "72"), ("#### 1e3", "1000"),
    ("#### 1.5e3", "1500"),
    ("#### 1.5 \u00d7 10^3", "1500"), (r"\boxed{1.5 \times 10^{3}}", "1500"), ("#### 1.5*10\u00b3", "1500"),
    ("#### 1.2 million", "1200000"), ("#### 5k", "5000"), ("#### 5 km", "5"), ("#### 1/2", "0.5"),
    ("#### 2 1/2", "2.5"),
    ("#### 2\u00bd", "2.5"), ("#### \u00be", "0.75"), ("#### \uff17\uff12", "72"), ("#### \u0667\u0662", "72"),
    ("#### minus 5", "-5"), ("#### +72", "72"), ("#### 0072", "72"), ("#### (72)", "72"), ("#### 72!", "72"),
    ("#### `72`", "72"), ("#### 2\u00b3", "8"), ("#### 12345678901234567890", "12345678901234567890"),
    # the truth as the data set has it
    ("#### 72.", "72"), ("#### 1,234", "1,234"), ("#### $5", "5"), ("#### 0.5", ".5"),
    ("#### **72** for 3 apples", "72"), ("#### 72", "She sells 48 + 24.\n#### 72"),
    ("first #### 10, no: #### 72", "72"), ("#### the answer is 72", "72"),
    ("The answer is $72.", "72"), ("The answer is $1,234.00, as asked.", "1234"),
    # thinking
    ("<think>#### 10</think>#### 72", "72"), ("#### 72<think>#### 10</think>", "72"),
    ("<think>a<think>b</think>3</think>#### 72", "72"),
    # cut off
    (("#### 72\nCheck: 48 +", CUT), "72"), ((r"\boxed{72} which is", CUT), "72"),
    (("The answer is 72. To che", CUT), "72"),
    (("The answer is 72.\n#### ", CUT), "72"), ((r"The answer is 72. So \boxed{7", CUT), "72"),
]

WRONG: list[tuple[str | tuple[str, dict[str, str]], str]] = [
    # no answer, or another
    ("", "72"), ("no number", "72"), ("$", "72"), ("#### ", "72"), ("#### ...", "72"), (r"\boxed{}", "72"),
    ("72 of 100", "72"),
    ("#### 72.5", "72"), ("#### -5", "5"), ("#### 5", "-5"), ("#### 1.2.3 or 72", "72"), ("#### 1.2.3", "3"),
    ("It could be 72.\n#### 10", "72"), (r"48 + 24 = 72, so \boxed{36}", "72"), ("72 clips. The answer is 36.", "72"),
    (r"\boxed{72} no, it is \boxed{10}", "72"), ("The answer is 72. Sorry, I mean 36.", "72"),
    ("#### 72\n#### 10", "72"),
    (r"\boxed{\text{none}} of 72", "72"), (r"\boxed{x} = 72", "72"), ("The answer is not 72.", "72"),
    ("It is not 72", "72"),
    ("10 - 3 = _7_", "3"), ("It has 72 cm^2.", "2"), ("It holds 72 m\u00b3", "3"),
    # several
    ("#### 5 or 6", "5"), ("#### 5 or 6", "6"), (r"\boxed{5 \text{ or } 6}", "5"), (r"\boxed{5} or \boxed{6}", "6"),
    ("The answer is 5 or 6.", "6"), ("The answer is either 5 or 6.", "5"), ("It is 5 or 6", "6"), ("#### 5, 6", "5"),
    (r"\boxed{5, 6}", "6"), ("#### 5 and 6", "5"), ("#### 5 apples or 6 apples", "5"), ("#### 5 to 6", "5"),
    ("#### 5-6", "5"), ("#### 5-6", "6"), ("#### 5 apples and 6 pears", "5"),
    ("between 5 and 6. #### between 5 and 6", "6"),
    ("The answer is between 5 and 6", "5"), ("The answer is more than 72", "72"), ("The answer is at least 72", "72"),
    (r"\boxed{x > 72}", "72"), (r"\boxed{x \leq 72}", "72"), ("#### 1 hour 30 minutes", "1"),
    ("#### 1 hour and 30 minutes", "30"),
    # parts of numbers
    ("#### 3/4", "3"), ("#### 3/4", "4"), (r"\boxed{\frac{3}{4}}", "4"), (r"\boxed{\frac{3}{4}}", "3"),
    ("#### 2 1/2", "2"),
    (r"\boxed{2\frac{1}{2}}", "2"), ("#### 2\u00bd", "10.5"), ("#### 1.5e3", "3"), ("#### 1.5 \u00d7 10^3", "3"),
    (r"\boxed{1.5 \times 10^{3}}", "1.5"), ("#### 10\u00b3", "103"), ("#### 10^3", "10"), (r"\boxed{2^3}", "2"),
    (r"\boxed{2^3}", "3"), (r"\boxed{1{,}234}", "234"), (r"\boxed{1{,}234}", "1"), ("#### 1,234", "1"),
    ("#### 5 million", "5"),
    ("#### 5k", "5"), ("#### 3:30", "3"), ("#### 3:30", "30"), ("#### 12/5/2021", "2021"), ("#### 12,34", "12"),
    ("#### 72/0", "72"), ("#### 72x", "72"), (r"\boxed{72x}", "72"), (r"\boxed{72 + x}", "72"),
    (r"\boxed{\sqrt{25}}", "25"),
    (r"\boxed{\frac{1}{0}}", "1"), ("#### 50%", "500"), ("#### 48 + 24", "24"), ("#### 48 + 24", "48"),
    ("#### 72 dollars and 50 cents", "72"), (r"\boxed{3 \times 24}", "24"),
    ("#### 12345678901234567890.1", "12345678901234567890.2"),
    # thinking
    ("<think>#### 72</think>I do not know", "72"), ("<think>so 72", "72"), ("#### 72 <think>or not", "72"),
    ("first #### 72, no: #### 10", "72"), ("<think>72</think>10", "72"), ("<think>a</think>#### 72<think>b", "72"),
    ("it is 72, I think </think>10", "72"), ("7<think></think>2", "72"),
    # cut off
    (("#### 72", CUT), "72"), (("The answer is 72", CUT), "72"), (("The answer is 72.", CUT), "72"),
    (("48 + 24 = 72", CUT), "72"),
    ((r"so \boxed{72", CUT), "72"), (("First there are 72 clips. Then", CUT), "72"), ((r"\boxed{\frac{7", CUT), "7"),
    # hostile
    (r"\boxed{9^{9^{9^{9}}}}", "9"), ("#### 1e999999999", "1"), (r"\boxed{10000!}", "72"),
    ("#### " + "9" * 20000, "72"),
    (r"\boxed{" * 3000, "72"), ("9" * 5000 + "/" + "9" * 5000, "1"),
    (r"\boxed{(((((((((1+1)^99)^99)^99)^99)))))}", "2"),
    (r"\boxed{\int_0^1 \sin(x^{x^{x}}) dx}", "72"), (r"\boxed{\sum_{n=1}^{999999999} n}", "72"),
    ("the answer is " * 3000, "72"), ("1/" * 10000, "1"), ("1 or 2 or " * 5000, "2"),
    ("answer for " + "a " * 20000, "72"),
]

ANSWERS = [(*each, 1.0) for each in RIGHT] + [(*each, 0.0) for each in WRONG]
