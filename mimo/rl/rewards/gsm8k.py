r"""GSM8K: word problems whose answer is a number, `#### 72` in the data set (arXiv:2110.14168).

A completion's answer is the last one that it states: `#### 72`, `\boxed{72}`, `the answer is 72` or `72 is the answer`.
If it states none, its last number is the answer. If the length limit cut the completion off, only an answer that is
stated in full counts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mimo.rl.rewards.expressions import compare
from mimo.rl.rewards.short_answers import visible_text, visible_truth

# Limits for characters of a stated answer, digits of a number, and exponents of ten. An untrained policy may exceed
# them with nonsense that would take long to read.
MAX_CONTENT, MAX_DIGITS, MAX_EXPONENT = 300, 500, 400

_SUPERSCRIPTS = dict(zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "0123456789", strict=True))
_SUPERSCRIPT = re.compile(f"[{''.join(_SUPERSCRIPTS)}]++")
_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\u2044": "/", "\u00d7": "*",
                        "\u00b7": "*", "\u22c5": "*", "\u00f7": "/", "\u2264": "<", "\u2265": ">"})
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CURRENCY = r"(?:(?:US|CA|AU)?\$|[\u20ac\u00a3\u00a5\u20b9]|USD\s?|EUR\s?|GBP\s?|Rs\.?\s?)"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})++(?:\.\d++)?|\d{1,2}(?:,\d{2}){1,9},\d{3}(?:\.\d++)?|\d++(?:\.\d++)?|\.\d++)"
# A sign that follows a digit, a letter or a bracket is a hyphen or an operator.
_VALUE = re.compile(rf"""
    (?:(?<![\w)\]}}])(?P<sign>[-+]|(?:minus|negative)\s))?
    (?P<currency>{_CURRENCY})?
    (?:(?<=[$\u20ac\u00a3\u00a5])(?P<inner_sign>[-+]))?
    (?<![A-Za-z_\d.])(?<!\d,)(?<!\d/)
    (?:
        (?:(?P<whole>\d++)\s+)?(?P<over>{_DIGITS})\s?/\s?(?P<under>{_DIGITS})
      | (?P<number>{_DIGITS})(?:[eE](?P<e>[-+]?\d++)|\s?[*x]\s?10\s?\^\s?\(?(?P<ten>[-+]?\d++)\)?)?
    )
    (?!\d|[.,:]\d|\s?/\s?\d)
    (?:\s?(?P<percent>%|percent\b|per\scent\b)|\s(?P<scale>{"|".join(_SCALES)})\b|(?P<thousands>[kK])(?![A-Za-z]))?
    """, re.VERBOSE)
_BOX = re.compile(r"\\f?box(?:ed)?\s?(?P<open>\{)?")
# An answer follows #### immediately; `#### Step 2` and `#### 2. Add them` are headings.
_MARK = re.compile(r"####[ \t*_`$\\({=:]*+(?=[-+]?[ ]?(?:[\d.]|[\u20ac\u00a3\u00a5\u20b9]|US|[dt]?frac\b|sqrt\b))"
                   r"(?!\d{1,2}[.)][ ]+[A-Za-z])")
_PHRASE = re.compile(
    r"(?i:\banswer\b)(?:\s(?:to|for|of)\s[^.\n:=]{0,80}?)?[*_`]*\s?"
    r"(?:(?:is|was|are|equals|comes (?:out )?to|(?:would|will|should|must|has to) be)\b|[:=])[ \t*_`:]*"
    r"|\u7b54\u6848[\u662f\u4e3a:]")
_IS_ANSWER = re.compile(r"\bis (?:the|my|our) (?:(?:final|correct|right) )?answer\b")
_END = re.compile(r"\n|[.!?;](?=\s)")
_END_OF_MARK = re.compile(r"\n|####|\\f?box")
# Words between two numbers neither of which is the answer, as in `5 or 6`.
_OR = re.compile(r"\bor\b\W{0,4}(?:[A-Za-z]+\W{1,3}){0,2}?")
_AND = re.compile(r"\s?(?:[A-Za-z]+\s)?(?:and|to|through|&|,|;|~)\s?")
_CENTS = re.compile(r"\s?dollars?,?\s(?:and\s)?(\d{1,2})\scents?\b")
_UNIT = r"(?:hours?|hrs?|h|minutes?|mins?|feet|foot|ft|inch(?:es)?|days?|weeks?|months?|years?|pounds?|lbs?|km|kg|m)"
# The exponent of a unit of area or volume, which is no number of the text.
_UNIT_POWER = re.compile(r"(?<![A-Za-z])([kcdm]?m|ft|feet|foot|in|inch(?:es)?|yd|yards?|mi|miles?|[a-z]*met(?:er|re)s?|"
                         r"units?)\s?\^\(?[23]\)?")
_COMPOUND = re.compile(rf"\s?{_UNIT}\b,?\s(?:and\s)?")
_INEXACT = re.compile(r"(?:more|less|greater|fewer|higher|lower|larger|smaller) than|\bat (?:least|most)\b|\bbetween\b|"
                      r"\bover\b|\bunder\b|\bneither\b|[<>]")
_NOT = re.compile(r"\bnot\b|n't\b")
_OPERATOR = re.compile(r"\s?(?:[-+*^]\s?(?:[-({\\\d.]|[A-Za-z]\b)|/\s?[(\\\d]|\\|[xyzn]\b|\(\s?[-\d\\])")
_REVISION = re.compile(r"(?i:\b(?:wait|actually|correction|sorry|oops|i mean|no, it|make that|let me re)\b)")


@dataclass(frozen=True)
class Reading:
    """A final answer as it was read.

    Attributes:
        value: the number; None if only math-verify can read it, or if there is no single number.
        is_percent: whether it has a percent sign.
        expression: text for math-verify; empty if it is not needed.
    """

    value: Fraction | None = None
    is_percent: bool = False
    expression: str = ""

    def is_right(self, wanted: Fraction) -> bool:
        """Whether this is the wanted number. `25%` counts as 25, and also as 0.25 if a fraction is wanted."""
        if self.expression:
            return compare(f"${wanted}$", f"${self.expression}$").equal
        if self.value is None:
            return False
        return self.value == wanted or (self.is_percent and wanted.denominator != 1 and self.value / 100 == wanted)


NO_ANSWER = Reading()


def reward(prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    r"""Return 1.0 if the completion's answer is the ground truth's number, else 0.0.

    Text in `<think>...</think>` does not count. Units, currency signs, thousands separators, percent signs, Markdown
    and LaTeX around a number are ignored. Fractions, mixed numbers and powers of ten are read exactly, and other
    expressions by math-verify. `5 or 6`, ranges and inequalities are not answers.

    Args:
        prompt: the problem.
        completion: the model's text.
        ground_truth: a number, or an answer of the data set that ends with `#### <number>`.
        metadata: has `finish_reason` `length` if the completion was cut off.

    Raises:
        ValueError: the ground truth has no number.
    """
    wanted = answer(visible_truth(ground_truth))
    if wanted is None:
        raise ValueError(f"gsm8k: the ground truth {ground_truth!r} has no number")
    text = visible_text(prompt, completion)
    if text is None:
        return 0.0
    return float(final_answer(text, is_cut=metadata.get("finish_reason") == "length").is_right(wanted))


def answer(text: str) -> Fraction | None:
    """Return the number that a text gives as its answer, or None."""
    return final_answer(text).value


def final_answer(text: str, *, is_cut: bool = False) -> Reading:
    """Read the answer of a text.

    Args:
        text: the completion without thinking.
        is_cut: whether the text was cut off, so that a number at its end may be incomplete.
    """
    text = _plain(text)
    stated = list(_statements(text))
    if is_cut:
        stated = [each for each in stated if each.is_closed]
    if not stated:
        return NO_ANSWER if is_cut else _last_number(text)
    last = max(stated, key=lambda each: each.begin)
    if last.is_phrase and not is_cut and (revised := _REVISION.search(text, last.begin)):
        return _last_number(text[revised.end():]) if _VALUE.search(text, revised.end()) else _read(last.content)
    others = [each for each in stated if 0 < last.begin - each.end <= 12]
    if any(re.fullmatch(r"[\s$.*]*(?:or|and|,)[\s$*]*", text[each.end:last.begin]) and each.content != last.content
           for each in others):
        return NO_ANSWER
    return _read(last.content)


@dataclass(frozen=True)
class _Statement:
    """An answer that a text states.

    Attributes:
        begin: index at which the statement begins in the text.
        end: index at which it ends.
        content: the stated answer.
        is_closed: whether the text that follows shows that the answer is complete.
        is_phrase: whether it is a sentence, after which a model may correct itself.
    """

    begin: int
    end: int
    content: str
    is_closed: bool
    is_phrase: bool = False


def _statements(text: str) -> Iterator[_Statement]:
    for mark in _BOX.finditer(text):
        found = _braced(text, mark.end()) if mark["open"] else re.compile(r"-?[\d.,]++").match(text, mark.end())
        if isinstance(found, int):
            yield _Statement(mark.start(), found + 1, text[mark.end():found], is_closed=True)
        elif found is not None:
            yield _Statement(mark.start(), found.end(), found[0].rstrip(".,"), is_closed=found.end() < len(text))
    for pattern, is_phrase in ((_MARK, False), (_PHRASE, True)):
        for mark in pattern.finditer(text):
            begin = mark.end()
            while text[begin:begin + 1].isspace():
                begin += 1
            limit = min(len(text), begin + MAX_CONTENT)
            stop = (_END if is_phrase else _END_OF_MARK).search(text, begin, limit)
            end = stop.start() if stop else limit
            content = text[begin:end]
            # A phrase before a box is not an answer of its own: the box is.
            if any(each.isdigit() for each in content) and "\\box" not in content and "\\fbox" not in content:
                # The match may have swallowed the sign or the backslash with which the answer begins.
                lead = re.search(r"[-+\\]?$", mark[0]) if not is_phrase else None
                yield _Statement(mark.start(), end, (lead[0] if lead else "") + content, end < len(text), is_phrase)
    for mark in _IS_ANSWER.finditer(text):
        before = re.split(r"\n|[.!?;]\s", text[max(0, mark.start() - 60):mark.start()])[-1]
        values = list(_VALUE.finditer(before))
        if values and not re.search(r"\banswer\b", before):
            yield _Statement(mark.start(), mark.end(), before[values[-1].start():], is_closed=True, is_phrase=True)


def _braced(text: str, begin: int) -> int | None:
    """Find the brace that closes the one before `begin`; None if it is not within `MAX_CONTENT` characters."""
    depth = 1
    for place in range(begin, min(len(text), begin + MAX_CONTENT)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


def _plain(text: str) -> str:
    """Normalise signs and digits, and remove LaTeX and Markdown without meaning for a number."""
    text = _SUPERSCRIPT.sub(lambda found: "^" + "".join(_SUPERSCRIPTS[each] for each in found[0]), text)
    # A space before characters such as a half keeps 2 and a half from becoming 21/2.
    text = "".join(f" {each}" if unicodedata.decomposition(each).startswith("<fraction>") else each for each in text)
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    text = "".join(str(unicodedata.decimal(each)) if each.isdecimal() else each for each in text)
    for pattern, plain in (
            (r"\{,\}|\\[,!](?=\d)", ","), (r"\\[,;:! ]|~", " "), (r"\\(?:left|right|displaystyle)\b", ""),
            (r"\\(?:text|textbf|mathrm|mathbf|mbox|textit)\s?\{([^{}]{0,80})\}", r" \1 "),
            (r"\\[dt]?frac\s?\{\s?(\d{1,40})\s?\}\s?\{\s?(\d{1,40})\s?\}", r" \1/\2 "),
            (r"\\[dt]?frac\s?(\d)\s?(\d)(?!\d)", r" \1/\2 "), (r"\\(?:times|cdot)\b", "*"), (r"\\div\b", "/"),
            (r"\\([%$&#])", r"\1"), (r"\^\{\s?([-+]?\d{1,9})\s?\}", r"^\1"), (r"\^\{?\\circ\}?|\\degree\b|\u00b0", " "),
            (r"\\(?:leq?|geq?)\b", "<"), (r"\\[()\[\]]", " "), (r"\\approx\b", "="), (r"\*\*|__|`", ""),
            (r"</?[A-Za-z][\w-]{0,30}>", " "), (r"(?<!\w)_([^_\n]{1,80})_(?!\w)", r"\1"),
            (r"[^\S\n]+", " "), (r"([-+]) (?=\d+/)", r"\1")):
        text = re.sub(pattern, plain, text)
    return text


def _read(content: str) -> Reading:
    """Read the content of a statement."""
    content = content.strip(" \t\n*_").rstrip(".,*_ ")
    # `48 + 24 = 72` and `x = 72`; `72 = x` is read from its left side.
    for part in reversed(content.split("=")):
        if any(each.isdigit() for each in part):
            content = part.strip()
            break
    content = re.sub(r"^(\(?)([-+]) ", r"\1\2", content)
    # Remove the dollar signs around a formula, but not one before a number.
    content = re.sub(r"^\$(.*)\$$", r"\1", content)
    match = _VALUE.search(content)
    first = re.search(r"\d|\\sqrt|\\frac|\\[dt]frac", content)
    if first and (match is None or first.start() < match.start()):
        return _expression(content)
    if match is None:
        return NO_ANSWER
    lead, rest = content[:match.start()], content[match.end():]
    if _NOT.search(lead):
        revised = re.search(r"\bbut\b", rest)
        return _read(rest[revised.end():]) if revised else NO_ANSWER
    if _INEXACT.search(lead):
        return NO_ANSWER
    value = _exact(match)
    cents = _CENTS.match(rest)
    if cents and value is not None:
        return Reading(value + Fraction(int(cents[1]), 100))
    if _is_one_of_several(value, rest):
        return NO_ANSWER
    if _OPERATOR.match(rest) or lead.rstrip().endswith(("*", "/", "^", "+", "(")) and lead.strip() not in ("(", "+"):
        return _expression(content)
    return Reading(value, bool(match["percent"]))


def _is_one_of_several(value: Fraction | None, rest: str) -> bool:
    """Whether another number follows on an equal footing, as in `5 or 6` and `3 hours and 20 minutes`."""
    for pattern in (_OR.search(rest), _AND.match(rest), _COMPOUND.match(rest)):
        other = _VALUE.match(rest, pattern.end()) if pattern else None
        if other is not None and _exact(other) != value:
            return True
    return False


def _expression(content: str) -> Reading:
    """Read an expression for math-verify: a short one with an operation and without a power of a power."""
    powers = re.findall(r"\^\{?\(?-?\d*", content)
    if (len(content) > 100 or "!" in content or "," in content or ":" in content or len(powers) > 3
            or re.search(r"\d{30}|\^\{?\(?-?\d{4}|\^[^\s]{0,12}\^|\d\.\d+\.\d|\bor\b|\band\b", content)
            or not re.search(r"[-+*/^(]|\\", content)):
        return NO_ANSWER
    return Reading(expression=content)


def _last_number(text: str) -> Reading:
    """Read the last number of a text that states no answer."""
    text = _UNIT_POWER.sub(r"\1", text)
    match, before = None, None
    for each in _VALUE.finditer(text):
        match, before = each, match
    if match is None:
        return NO_ANSWER
    value, lead = _exact(match), text[max(0, match.start() - 30):match.start()]
    if before is not None and _exact(before) != value:
        between = text[before.end():match.start()]
        if len(between) < 30 and re.fullmatch(r"\W{0,3}(?:[A-Za-z]+\W{1,3}){0,2}or\W{1,3}", between):
            return NO_ANSWER
    if re.search(r"(?:\bnot|n't(?: be)?|than|at least|at most|[<>]|between [^.\n]{0,20}) ?$", lead):
        return NO_ANSWER
    return Reading(value, bool(match["percent"]))


def _exact(match: re.Match[str]) -> Fraction | None:
    """Return the number of a match; None if it is too long or divides by 0."""
    if len(match[0]) > MAX_DIGITS:
        return None
    exponent = int(match["e"] or match["ten"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    if match["number"] is not None:
        value = _decimal(match["number"]) * Fraction(10) ** exponent
    elif _decimal(match["under"]) == 0:
        return None
    else:
        value = Fraction(match["whole"] or 0) + _decimal(match["over"]) / _decimal(match["under"])
    value *= _SCALES.get(match["scale"] or "", 1000 if match["thousands"] else 1)
    signs = [match["sign"], match["inner_sign"]]
    return -value if sum(sign is not None and sign != "+" for sign in signs) == 1 else value


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
