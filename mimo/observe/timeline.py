"""Where the time of a step went, by module: parts that sum to the step, agreed over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mimo.batch import Microbatch
from mimo.grid.spec import Layout
from mimo.observe.spans import Interval, Kind

# What a rank does for one module alone. Grids that share ranks have each other's as one more part.
OWN_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.GRADIENT_SYNC)
OTHER_MODULES = "other-modules"
STEP = "step"
PARTS = (*(str(kind) for kind in Kind), OTHER_MODULES)


def parts_of(intervals: Iterable[Interval], module: str) -> dict[str, float]:
    """Seconds of a rank's step in each of `PARTS`, as one of its modules sees it; they sum to the step."""
    parts = dict.fromkeys(PARTS, 0.0)
    for interval in intervals:
        label = interval.label
        others = label.module != module and label.kind in OWN_KINDS
        parts[OTHER_MODULES if others else label.kind] += interval.end_s - interval.begin_s
    return parts


class Timeline:
    """Turns the intervals of every rank into figures of modules and lanes.

    Each rank gives a row of numbers (`own`); the caller takes maximum and sum of it over all ranks, and every rank
    reads the figures from these (`figures`).

    Args:
        layout: all grids.
        rank: this one.
        reports_lane: whether this rank speaks for its lane: one of each lane's ranks.
    """

    def __init__(self, layout: Layout, rank: int, *, reports_lane: bool) -> None:
        self.layout, self.rank = layout, rank
        self._lane = layout.language.coordinates(rank)["dp"] if reports_lane else None
        self.parts = (*(part for part in PARTS if part != OTHER_MODULES or layout.kind == "colocated"), STEP)

    def own(self, intervals: Sequence[Interval], microbatches: Sequence[Microbatch]) -> list[float]:
        """This rank's row: of each module its parts, 0 where the rank does not hold it; tokens of each lane."""
        row: list[float] = []
        for name, grid in self.layout.grids.items():
            if self.rank in grid.ranks:
                parts = parts_of(intervals, name)
                parts[STEP] = intervals[-1].end_s - intervals[0].begin_s
                row += [parts[part] for part in self.parts]
            else:
                row += [0.0] * len(self.parts)
        for tokens in lane_tokens(microbatches):
            row += [tokens if lane == self._lane else 0.0 for lane in range(self.layout.num_lanes)]
        return row

    def figures(self, largest: Sequence[float], summed: Sequence[float]) -> dict[str, float]:
        """Figures by name, from the maximum and the sum of all ranks' rows.

        Returns:
            `<module>/<part>-s` and `<module>/<part>-max-s`: mean and maximum over the module's ranks, seconds;
            `image-tokens-per-lane/min` and `/max`, `text-tokens-per-lane/...`: of the step.
        """
        found, index = {}, 0
        for name, grid in self.layout.grids.items():
            for part in self.parts:
                found[f"{name}/{part}-s"] = summed[index] / grid.size
                found[f"{name}/{part}-max-s"] = largest[index]
                index += 1
        for kind, tokens in self.lanes(summed).items():
            found[f"{kind}-tokens-per-lane/min"], found[f"{kind}-tokens-per-lane/max"] = min(tokens), max(tokens)
        return found

    def lanes(self, summed: Sequence[float]) -> dict[str, list[float]]:
        """`image` and `text` tokens of each lane, from the sum of all ranks' rows."""
        images, texts = 2 * self.layout.num_lanes, self.layout.num_lanes
        return {"image": list(summed[-images:-texts]), "text": list(summed[-texts:])}


def lane_tokens(microbatches: Sequence[Microbatch]) -> tuple[float, float]:
    """Image and text tokens of this rank's lane in a step, padding excluded; zero on ranks without text."""
    images = total = 0
    for batch in microbatches:
        if batch.text is not None:
            images += sum(map(sum, batch.text.token_counts.values()))
            total += batch.text.num_tokens
    return float(images), float(total - images)
