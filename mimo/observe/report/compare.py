"""Sections of two runs side by side: difference of their losses, and of their flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from mimo.observe.report.html import section, table
from mimo.observe.report.lines import Line, line_chart
from mimo.observe.report.run import Floats, Run
from mimo.observe.report.text import number, rounded

NUM_ROWS = 8
# Flags that say where a run is, not what it is.
NO_FLAGS = ("run-dir", "tensorboard-dir")


@dataclass(frozen=True)
class Difference:
    """Figures of two runs at the iterations that both have.

    Attributes:
        key: of the figure.
        iterations: float64 `[n]`.
        one, two: float64 `[n]`, finite.
    """

    key: str
    iterations: Floats
    one: Floats
    two: Floats

    @property
    def first_unequal(self) -> int | None:
        """The first iteration at which they differ at all; None where they never do."""
        places = np.flatnonzero(self.one != self.two)
        return int(self.iterations[places[0]]) if len(places) else None


def difference(one: Run, two: Run) -> Difference | None:
    """Losses, or rewards in reinforcement learning; None where the runs have no iteration in common."""
    if one.learns_from_rewards != two.learns_from_rewards:
        return None
    key = "reward" if one.learns_from_rewards else "lm loss"
    shared, left, right = np.intersect1d(one.steps.iterations, two.steps.iterations, return_indices=True)
    first, second = one.steps.get(key)[left], two.steps.get(key)[right]
    kept = np.isfinite(first) & np.isfinite(second)
    if not kept.any():
        return None
    return Difference(key, shared[kept].astype(np.float64), first[kept], second[kept])


def _sentences(found: Difference) -> str:
    gap = found.two - found.one
    place = int(np.abs(gap).argmax())
    if found.first_unequal is None:
        return f"Equal to the last digit in all {len(gap):,} iterations that both have."
    mean, same = float(np.abs(gap).mean()), ""
    share = mean / (float(np.abs(found.one).mean()) or 1.0)
    if found.first_unequal > found.iterations[0]:
        same = f" They are equal to the last digit before iteration {found.first_unequal:,}."
    return (f"Over the {len(gap):,} iterations that both have, they differ by {rounded(mean)} in the mean "
            f"({rounded(100 * share)} %) and by {rounded(float(abs(gap[place])))} at most (iteration "
            f"{int(found.iterations[place]):,}).{same}")


def compare_section(runs: Sequence[Run]) -> str:
    """Difference of the losses of two runs; nothing for one."""
    if len(runs) < 2:
        return ""
    found = difference(*runs)
    blocks, intro = [], ""
    if found is not None:
        gap = found.two - found.one
        what = "reward" if found.key == "reward" else "loss"
        if found.first_unequal is not None:
            blocks.append(line_chart(f"Difference of the {what}, B minus A",
                                     [Line("B minus A", found.iterations, gap)], zero=True))
        places = np.unique(np.linspace(0, len(gap) - 1, NUM_ROWS).round().astype(np.int64)).tolist()
        rows = [[f"{int(at):,}", number(first), number(second), number(second - first),
                 f"{rounded(100 * (second - first) / first)} %" if first else ""]
                for at, first, second in np.stack([found.iterations, found.one, found.two], 1)[places].tolist()]
        blocks.append(table(["iteration", f"A: {what}", f"B: {what}", "B minus A", "of A"], rows, wide=False))
        intro = _sentences(found)
    blocks.append(_flags(*runs))
    return section("A against B", blocks, intro)


def _flags(one: Run, two: Run) -> str:
    """Flags that differ."""
    rows = []
    for name in dict.fromkeys([*one.flags, *two.flags]):
        first, second = one.flags.get(name, {}), two.flags.get(name, {})
        for flag in dict.fromkeys([*first, *second]):
            if flag not in NO_FLAGS and first.get(flag) != second.get(flag):
                shown = [escape(str(values[flag])) if flag in values else "&ndash;" for values in (first, second)]
                rows.append([f"<code>--{escape(flag)}</code>", *shown])
    return table(["flag", "A", "B"], rows, "Flags that differ", numeric_from=3)
