"""Sections of two runs side by side: difference of their losses, and of their flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from mimo.observe.report.html import section, table
from mimo.observe.report.lines import Line, line_chart
from mimo.observe.report.run import Floats, Run, evenly
from mimo.observe.report.text import number, rounded

NUM_ROWS = 8
# Flags that say where a run is, not what it is.
NO_FLAGS = ("run-dir", "tensorboard-dir")


@dataclass(frozen=True)
class Difference:
    """Figures of two runs at the iterations that both have.

    Attributes:
        key: of the figure.
        iterations: of those where both figures are finite, float64 `[n]`.
        one, two: float64 `[n]`, finite.
        one_sided: iterations where just one run's figure is finite, float64.
        lost_by: letter of the run whose figure is not finite at the first of these; empty without one.
        num_shared: iterations that both have, finite or not.
    """

    key: str
    iterations: Floats
    one: Floats
    two: Floats
    one_sided: Floats
    lost_by: str
    num_shared: int

    @property
    def first_unequal(self) -> int | None:
        """The first iteration at which they differ at all, a figure that is not finite included; None without one."""
        unequal = [*self.iterations[self.one != self.two][:1], *self.one_sided[:1]]
        return int(min(unequal)) if unequal else None


def difference(one: Run, two: Run) -> Difference | None:
    """Losses, or rewards in reinforcement learning; None without an iteration at which either is finite."""
    if one.learns_from_rewards != two.learns_from_rewards:
        return None
    key = "reward" if one.learns_from_rewards else "lm loss"
    shared, left, right = np.intersect1d(one.steps.iterations, two.steps.iterations, return_indices=True)
    first, second = one.steps.get(key)[left], two.steps.get(key)[right]
    kept, lost = np.isfinite(first) & np.isfinite(second), np.isfinite(first) != np.isfinite(second)
    if not (kept | lost).any():
        return None
    lost_by = "".join("B" if is_finite else "A" for is_finite in np.isfinite(first[lost])[:1].tolist())
    return Difference(key, shared[kept].astype(np.float64), first[kept], second[kept],
                      shared[lost].astype(np.float64), lost_by, len(shared))


def _sentences(found: Difference) -> str:
    return " ".join(filter(None, [_of_finite(found), _of_one_sided(found)]))


def _of_one_sided(found: Difference) -> str:
    if not len(found.one_sided):
        return ""
    return (f"In {len(found.one_sided):,} of the {found.num_shared:,} iterations that both have, only one run's figure "
            f"is finite, first in iteration {int(found.one_sided[0]):,} ({found.lost_by}'s is not).")


def _of_finite(found: Difference) -> str:
    gap = found.two - found.one
    if not len(gap):
        return ""
    every = len(gap) == found.num_shared
    which = f"{len(gap):,} iterations {'that both have' if every else 'in which both are finite'}"
    if not gap.any():
        return f"Equal to the last digit in {'all' if every else 'the'} {which}."
    place = int(np.abs(gap).argmax())
    mean, same = float(np.abs(gap).mean()), ""
    share = mean / (float(np.abs(found.one).mean()) or 1.0)
    if found.first_unequal is not None and found.first_unequal > found.iterations[0]:
        same = f" They are equal to the last digit before iteration {found.first_unequal:,}."
    return (f"Over the {which}, they differ by {rounded(mean)} in the mean ({rounded(100 * share)} %) and by "
            f"{rounded(float(abs(gap[place])))} at most (iteration {int(found.iterations[place]):,}).{same}")


def compare_section(runs: Sequence[Run]) -> str:
    """Difference of the losses of two runs; nothing for one."""
    if len(runs) < 2:
        return ""
    found = difference(*runs)
    blocks, intro = [], ""
    if found is not None:
        gap = found.two - found.one
        what = "reward" if found.key == "reward" else "loss"
        if gap.any():
            blocks.append(line_chart(f"Difference of the {what}, B minus A",
                                     [Line("B minus A", found.iterations, gap)], zero=True))
        places = evenly(len(gap), NUM_ROWS)
        rows = [[f"{int(at):,}", number(first), number(second), number(second - first),
                 f"{rounded(100 * (second - first) / first)} %" if first else ""]
                for at, first, second in np.stack([found.iterations, found.one, found.two], 1)[places].tolist()]
        blocks.append(table(["iteration", f"A: {what}", f"B: {what}", "B minus A", "of A"], rows, wide=False))
        intro = _sentences(found)
    blocks.append(_flags(*runs))
    if intro and not any(blocks):  # two runs with equal flags and nothing to compare: the sentence is all there is
        blocks, intro = [f"<p>{intro}</p>"], ""
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
