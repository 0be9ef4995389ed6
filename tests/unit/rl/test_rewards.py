"""Rewards: what counts as an answer, case by case."""

import os
import threading
from fractions import Fraction

import pytest

from mimo import registry
from mimo.rl.rewards.expressions import Comparer
from mimo.rl.rewards.gsm8k import answer
from mimo.rl.rewards.gsm8k import reward as gsm8k
from mimo.rl.rewards.short_answers import choice, exact_match, multiple_choice, visible_text
from tests.support.gsm8k_answers import ANSWERS


@pytest.mark.parametrize("right", [1.0, 0.0], ids=["accepted", "refused"])
def test_gsm8k_scores_odd_answers_as_an_examiner_would(right):
    assert len(ANSWERS) >= 94
    wrongly_scored = []
    for given, truth, expected in ANSWERS:
        text, metadata = given if isinstance(given, tuple) else (given, {})
        if expected == right and gsm8k("", text, truth, metadata) != expected:
            wrongly_scored.append((text[:100], truth))
    assert wrongly_scored == []


@pytest.mark.slow
def test_an_expression_that_takes_too_long_is_wrong_and_the_next_is_compared():
    """On a thread, where signals do not come."""
    comparer = Comparer()
    results = []

    def ask():
        results.append(comparer.compare("$8$", "$2^3$"))
        results.append(comparer.compare("$8$", "$9^{9^{9^{9}}}$", limit_s=0.2))
        results.append(comparer.compare("$8$", "$2^3$"))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(250)
    assert [each.equal for each in results] == [True, False, True]


def test_the_comparer_gets_no_signal_to_the_process_group():
    """torchrun and Ctrl-C stop a whole group, and the run still finishes its iteration."""
    comparer = Comparer()
    assert comparer.compare("$1/2$", "$0.5$").equal
    process = comparer._process
    assert os.getpgid(process.pid) != os.getpgid(0)
    comparer._kill()


def test_math_verify_on_a_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(registry.reward("math-verify")("", "1/2", "0.5", {})))
    thread.start()
    thread.join(250)
    assert scores == [1.0]


def test_gsm8k_where_the_prompt_begins_the_thinking():
    prompt = "<|im_start|>assistant\n<think>\n"
    assert gsm8k(prompt, "48 + 24</think>\n#### 72", "72", {}) == 1.0
    assert gsm8k(prompt, "48 + 24\n#### 72", "72", {}) == 0.0


@pytest.mark.parametrize("text", ["." * 20000, "#### " + "," * 20000, "-" * 20000, "#" * 20000, "$" * 20000,
                                  "<think>" * 3000, "9" * 20000, "1-" * 10000, "\n" * 100000,
                                  "answer" + " " * 100000 + "xx"])
def test_long_nonsense_is_read_in_one_pass(text):
    # Patterns that go back would not come to an end here.
    assert gsm8k("", text, "72", {}) == 0.0
    assert multiple_choice("", text, "A", {}) == 0.0


def test_numbers_are_exact():
    assert answer("#### 0.1") == Fraction(1, 10)
    assert gsm8k("", "#### 12345678901234567890.1", "12345678901234567890.2", {}) == 0.0


@pytest.mark.parametrize(("prompt", "completion", "expected"), [
    ("", "plain", "plain"), ("", "a<think>b\nc</think>d", "a d"), ("", "<think>b", None), ("<think>", "b", None),
    ("<think>\n", "b</think>c", "c"), ("", "b</think>c", "c"), ("<think>x</think>", "c", "c")])
def test_visible_text(prompt, completion, expected):
    text = visible_text(prompt, completion)
    assert (text if text is None else text.strip()) == expected


@pytest.mark.parametrize(("completion", "truth", "expected"), [
    ("Paris", "Paris", 1), ("  Paris\n", "Paris", 1), ("New  York", "New York", 1), ("paris", "Paris", 0),
    ("Paris.", "Paris", 0), ("<think>Rome?</think>Paris", "Paris", 1), ("<think>Paris", "Paris", 0), ("", "Paris", 0),
    ("7", "7", 1), ("77", "7", 0),
])
def test_exact_match(completion, truth, expected):
    assert exact_match("", completion, truth, {}) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("B", "B"), ("(B)", "B"), ("B.", "B"), ("B) Paris", "B"), ("**B**", "B"), ("B: Paris", "B"),
    ("The answer is B", "B"), ("The answer is (B).", "B"), ("Answer: B", "B"), ("answer: b", "B"),
    ("ANSWER: **B**", "B"), ("option c", "C"),
    ("The final answer is $\\boxed{B}$", "B"), ("\\boxed{\\text{B}}", "B"), ("\\boxed{B. Paris}", "B"),
    ("<answer>B</answer>", "B"), ("A dog runs.\n<answer>B. Paris</answer>", "B"), ("Answer: `B`", "B"),
    ("The answer is $B$.", "B"), ('It is "B".', "B"), (r"\boxed{\mathbf{B}}", "B"), ("<b>Because</b>", None),
    ("I first thought the answer is A. No, the answer is B.", "B"),
    ("Answer: I think it is (B)", "B"), ("Answer: I", "I"), ("Answer: B because it rains", "B"),
    ("Option A is wrong, option B is right.", "B"),
    ("A dog runs. \\boxed{C}", "C"), ("A is false. So it must be (D)", "D"),
    ("A dog is an animal", None), ("the answer is a dog", None), ("Because", None), ("", None), ("It's", None),
    ("so it is C", "C"), ("so it is C.", "C"), ("Explanation\nC\n", "C"), ("the answer is Paris", None),
])
def test_choice(text, expected):
    assert choice(text) == expected


@pytest.mark.parametrize(("completion", "truth", "metadata", "expected"), [
    ("<think>A</think>The answer is B", "(b)", {}, 1), ("The answer is B <think>", "B", {}, 0),
    ("(A) or (E)?", "A", {"num_choices": 4}, 1), ("(A) or (E)?", "A", {}, 0),
])
def test_multiple_choice(completion, truth, metadata, expected):
    assert multiple_choice("", completion, truth, metadata) == expected


@pytest.mark.parametrize(("reward", "truth", "metadata", "message"), [
    *((gsm8k, truth, {}, "has no number") for truth in ("", "none", "#### ")),
    (exact_match, " ", {}, "ground truth is empty"),
    *((multiple_choice, truth, {}, "is not a letter of 'ABCDEFGHIJ'") for truth in ("", "AB", "5", "K")),
    (multiple_choice, "E", {"num_choices": 4}, "'E' is not a letter of 'ABCD'"),
])
def test_a_truth_that_nothing_can_be_compared_with_is_refused(reward, truth, metadata, message):
    with pytest.raises(ValueError, match=message):
        reward("", "72", truth, metadata)


@pytest.mark.parametrize(("name", "completion", "truth"), [
    ("exact-match", "Paris", "<think>Rome?</think>\n\nParis"), ("multiple-choice", "B", "<think>A?</think>(B)"),
    ("gsm8k", "#### 4", "<think>The answer is 5. No.</think>\nIt is 4."),
    ("gsm8k", "4", "The answer is 5.</think>It is 4."),
    ("math-verify", "$4$", "<think>$5$?</think> 4"),
])
def test_thoughts_of_a_truth_do_not_count(name, completion, truth):
    reward = registry.reward(name)
    assert [reward("", text, truth, {}) for text in (completion, f"<think>5</think>{completion}", "5")] == [1, 1, 0]


def own(prompt, completion, ground_truth, metadata):
    return len(completion) / 10


NOT_CALLABLE = 3


def test_rewards_by_name():
    assert registry.reward("gsm8k") is gsm8k
    assert registry.reward("exact-match") is exact_match
    assert registry.reward("multiple-choice") is multiple_choice
    assert registry.reward("mimo.rl.rewards.gsm8k:reward") is gsm8k
    assert registry.reward("tests.unit.rl.test_rewards:own")("", "abc", "", {}) == 0.3


@pytest.mark.parametrize(("name", "message"), [
    ("gsm9k", "--reward gsm9k: unknown; built in are exact-match, gsm8k, math-verify, multiple-choice"),
    ("nowhere.at_all:fn", "no module 'nowhere.at_all'"),
    ("mimo.rl.rewards.gsm8k:nothing", "has no attribute 'nothing'"),
    ("tests.unit.rl.test_rewards:NOT_CALLABLE", "3 cannot be called"),
])
def test_rewards_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        registry.reward(name)


def test_math_verify_without_its_package(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--reward gsm8k needs the package math-verify"):
        registry.reward("gsm8k")
    with pytest.raises(ValueError, match="--reward math-verify needs the package math-verify, .* pip install math"):
        registry.reward("math-verify")


@pytest.mark.parametrize(("completion", "truth", "expected"), [
    (r"so \boxed{\frac{1}{2}}", "0.5", 1), ("the answer is $0.50$", r"\frac{1}{2}", 1), ("1/2", "1/2", 1),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1), (r"<think>\boxed{3}</think> it is 4", "4", 1), (r"<think>\boxed{4}", "4", 0),
    ("x", "72", 0), ("", "72", 0),
])
def test_math_verify(completion, truth, expected):
    assert registry.reward("math-verify")("", completion, truth, {}) == expected
