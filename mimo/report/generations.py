"""Answers of the model on the page: held-out samples and prompts, and completions of training with their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from mimo.report.charts import run_name
from mimo.report.html import plain_table, section
from mimo.report.run_reader import Run, evenly
from mimo.report.summary import number, rounded
from mimo.text import counted

# Most iterations of training, held-out prompts, and bytes of images on a page.
MAX_TRAINING, MAX_HELD_OUT, MAX_IMAGE_BYTES = 6, 20, 2 << 20
Line = Mapping[str, Any]


class _Cards:
    """Renders prompts with their answers. Images are left out once there are too many of them for the page."""

    def __init__(self) -> None:
        self._left = MAX_IMAGE_BYTES

    def card(self, title: str, line: Line, body: str) -> str:
        """Return a prompt with its images and expected answer above a body of HTML."""
        parts = [f"<h3>{_text(title)}</h3>", self._images(line)]
        if line["prompt"]:
            parts.append(f'<div class="said prompt">{_text(line["prompt"])}</div>')
        if line["expected"]:
            parts.append(f'<p>Expected: <span class="said">{_text(line["expected"])}</span></p>')
        return f"<figure>{''.join(parts)}{body}</figure>"

    def _images(self, line: Line) -> str:
        shown = []
        for place, url in enumerate(line["images"], 1):
            self._left -= len(url)
            if self._left >= 0:
                shown.append(f'<img src="{url}" alt="image {place} of {_text(line["key"])}">')
        missing = line["num_images"] - len(shown)
        if missing:
            words = f"image{'s' * (missing > 1)}"
            shown.append(f"<span>{f'and {missing} more {words}' if shown else f'{missing} {words}, not shown'}</span>")
        return f'<div class="images">{"".join(shown)}</div>' if shown else ""


def _text(text: str) -> str:
    """Escape a text for HTML in ASCII. Half a surrogate pair, which no file can hold, becomes a replacement sign."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()


def _said(answer: Line) -> str:
    cut = ' <em class="cut">cut by the limit</em>' if answer["truncated"] else ""
    return f'<span class="said">{_text(answer["text"]) or "<em>empty</em>"}</span>{cut}'


def _is_expected(line: Line) -> bool:
    return bool(line["answers"][0]["text"] == line["expected"])


def _figure(value: float | None) -> str:
    return "" if value is None else rounded(value)


def generations_section(runs: Sequence[Run]) -> str:
    """Show what the model answered, to held-out samples or prompts and in training."""
    cards = _Cards()
    blocks = [block for index, run in enumerate(runs) for block in (*_held_out(cards, runs, index, run),
                                                                     *_training(cards, runs, index, run))]
    rewarded = any(run.learns_from_rewards for run in runs)
    intro = ("Completions of the same held-out prompts over the run, and of some prompts of training. An update makes "
             "completions with an advantage above 0 more likely, and those with one below 0 less likely." if rewarded
             else "The model's greedy answers to held-out samples, after the last evaluation.")
    return section("Completions" if rewarded else "Answers", blocks, intro)


def _held_out(cards: _Cards, runs: Sequence[Run], index: int, run: Run) -> Iterator[str]:
    """Yield a card for each held-out sample or prompt, with an answer for each iteration that has one."""
    by_key: dict[str, list[Line]] = {}
    for line in run.generations:
        if line["kind"] == "held-out":
            by_key.setdefault(line["key"], []).append(line)
    # Prompts that were asked most often show best whether answers change.
    chosen = sorted(by_key.values(), key=lambda lines: -len(lines))[:MAX_HELD_OUT]
    if not chosen:
        return
    shown = []
    for lines in chosen:
        lines = [lines[place] for place in evenly(len(lines), MAX_TRAINING)]
        if lines[-1]["answers"][0]["reward"] is None:
            mark = "" if _is_expected(lines[-1]) else ' <em class="cut">not the expected one</em>'
            body = f"<p>Answer: {_said(lines[-1]['answers'][0])}{mark}</p>"
        else:
            body = plain_table(["iteration", "completion", "reward"],
                               [[f"{line['iteration']:,}", _said(answer), _figure(answer["reward"])]
                                for line in lines for answer in line["answers"]], numeric_from=2)
        shown.append(cards.card(lines[-1]["key"], lines[-1], body))
    left_out = f" ({len(chosen)} of {len(by_key)})" if len(chosen) < len(by_key) else ""
    title = f"Held-out prompts{left_out}"
    if not run.learns_from_rewards:
        right = sum(_is_expected(lines[-1]) for lines in by_key.values())
        title = f"Held-out samples{left_out}: {right} of {len(by_key)} answers are as expected"
    yield _folded(run_name(runs, index, title), shown)


def _training(cards: _Cards, runs: Sequence[Run], index: int, run: Run) -> Iterator[str]:
    """Yield a part for each iteration that was recorded, or for some of them."""
    by_iteration: dict[int, list[Line]] = {}
    for line in run.generations:
        if line["kind"] == "training":
            by_iteration.setdefault(line["iteration"], []).append(line)
    every = sorted(by_iteration)
    places = evenly(len(every), MAX_TRAINING)
    for place in places:
        lines = by_iteration[every[place]]
        shown = []
        for line in lines:
            rows = [[_said(answer), _figure(answer["reward"]), _figure(answer["advantage"])]
                    for answer in line["answers"]]
            missing = line["num_answers"] - len(rows)
            note = f"<figcaption>{missing} more completions are not shown.</figcaption>" if missing else ""
            shown.append(cards.card(line["key"], line,
                                    plain_table(["completion", "reward", "advantage"], rows) + note))
        rewards = [answer["reward"] for line in lines for answer in line["answers"] if answer["reward"] is not None]
        mean = f", their mean reward {rounded(sum(rewards) / len(rewards))}" if rewards else ""
        title = f"Training, iteration {number(every[place])}: completions of {counted(len(lines), 'prompt')}{mean}"
        yield _folded(run_name(runs, index, title), shown, is_open=place in (places[0], places[-1]))


def _folded(title: str, shown: Sequence[str], *, is_open: bool = True) -> str:
    return (f'<details class="wide"{" open" * is_open}><summary>{_text(title)}</summary>'
            f'<div class="charts">{"".join(shown)}</div></details>')
