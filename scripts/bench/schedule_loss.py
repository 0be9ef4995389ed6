"""Where the time of a step went beyond the ideal, from the intervals of all ranks: every interval goes to one part.

The split is that of one grid, the one whose passes take longest (`critical`), averaged over its ranks:

    ideal            seconds of its passes when it runs alone, mean over its ranks: no bubble, no straggler
    slower passes    what the same passes take longer inside the step
    imbalance        waits while another lane, or in the steady part the other grid, has a longer microbatch
    bubble           waits inside the module's own pipeline
    fill and drain   waits before the grid has its first work and after its last, while the other grid works
    bridge           waits for the other grid in which nobody computes: the transfer itself
    gradient sync, optimizer, data, other

A wait is charged by what the other ranks do at that moment. What is left when nobody does anything that explains it is
the wait's own: transfer, reduction, or `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mimo.observability.spans import Interval, Kind
from mimo.protocols import LANGUAGE

IDEAL, SLOWER, IMBALANCE, BUBBLE, FILL = "ideal", "slower passes", "imbalance", "bubble", "fill and drain"
BRIDGE, GRADIENT_SYNC, OPTIMIZER, DATA, OTHER = "bridge", "gradient sync", "optimizer", "data", "other"
PARTS = (IDEAL, SLOWER, IMBALANCE, BUBBLE, FILL, BRIDGE, GRADIENT_SYNC, OPTIMIZER, DATA, OTHER)
PASSES = (Kind.FORWARD, Kind.BACKWARD)
# What a wait is charged with when nothing that other ranks do explains it.
OWN_PART = {Kind.BRIDGE_WAIT: BRIDGE, Kind.PIPELINE_WAIT: BUBBLE, Kind.DATA_WAIT: DATA,
            Kind.GRADIENT_SYNC: GRADIENT_SYNC, Kind.OPTIMIZER: OPTIMIZER, Kind.IDLE: OTHER, Kind.OTHER: OTHER}
WAITS = (Kind.BRIDGE_WAIT, Kind.PIPELINE_WAIT, Kind.GRADIENT_SYNC, Kind.IDLE)

Span = tuple[float, float]


@dataclass(frozen=True)
class RankStep:
    """A rank in a step.

    Attributes:
        rank: global.
        module: that it holds.
        lane: its data-parallel index in the module's grid.
        intervals: of the step, in order, each beginning where the one before ends, on one clock for all ranks.
    """

    rank: int
    module: str
    lane: int
    intervals: Sequence[Interval]

    @property
    def seconds(self) -> float:
        """From the begin of the step to its end."""
        return self.intervals[-1].end_s - self.intervals[0].begin_s


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as few spans, in order, that neither touch nor overlap."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def cut(span: Span, cover: Sequence[Span]) -> tuple[float, list[Span]]:
    """Seconds of `span` that lie in `cover` (as `merged` gives it), and what of it does not."""
    begin, end = span
    inside, outside = 0.0, []
    index = max(bisect_left(cover, (begin, begin)) - 1, 0)
    while index < len(cover) and cover[index][0] < end:
        first, last = max(cover[index][0], begin), min(cover[index][1], end)
        if last > first:
            if first > begin:
                outside.append((begin, first))
            inside += last - first
            begin = last
        index += 1
    if end > begin:
        outside.append((begin, end))
    return inside, outside


def charge(span: Span, causes: Sequence[tuple[Sequence[Span], str]], own: str, parts: dict[str, float]) -> None:
    """Add the seconds of `span` to `parts`: to the first cause that covers them, the rest to `own`."""
    left = [span]
    for cover, part in causes:
        rest: list[Span] = []
        for piece in left:
            inside, outside = cut(piece, cover)
            parts[part] += inside
            rest += outside
        left = rest
    parts[own] += sum(end - begin for begin, end in left)


def spans_of(steps: Iterable[RankStep], kinds: Sequence[Kind]) -> list[Span]:
    """When any of these ranks was in a stretch of such a kind."""
    return merged((each.begin_s, each.end_s) for step in steps for each in step.intervals if each.label.kind in kinds)


def pass_seconds(step: RankStep) -> float:
    """Seconds of a rank's forward and backward passes."""
    return sum(each.end_s - each.begin_s for each in step.intervals if each.label.kind in PASSES)


def mean_pass_seconds(steps: Sequence[RankStep], module: str) -> float:
    """The same, mean over a module's ranks: the time of a step in which this grid never waits."""
    own = [pass_seconds(step) for step in steps if step.module == module]
    return sum(own) / len(own)


def microbatch_seconds(steps: Sequence[RankStep], module: str) -> list[list[float]]:
    """Seconds of the passes of each microbatch in each lane of a module, mean over the lane's ranks."""
    lanes = sorted({step.lane for step in steps if step.module == module})
    found: dict[int, dict[int, float]] = {}
    for lane in lanes:
        ranks = [step for step in steps if step.module == module and step.lane == lane]
        for step in ranks:
            for each in step.intervals:
                if each.label.kind in PASSES and each.label.microbatch is not None:
                    times = found.setdefault(each.label.microbatch, dict.fromkeys(lanes, 0.0))
                    times[lane] += (each.end_s - each.begin_s) / len(ranks)
    return [list(found[microbatch].values()) for microbatch in sorted(found)]


def steady_window(lane: Sequence[RankStep], module: str) -> Span:
    """When a lane of a module has its own work to do: before it fills, after it drains.

    The language model: from its first forward pass to the end of its last backward one. An encoder: from its first
    backward pass to the end of its last forward one, since before and after it waits for the language model's; one
    without backward passes, from its first forward pass to its last.
    """
    times = {kind: [(each.begin_s, each.end_s) for step in lane for each in step.intervals if each.label.kind == kind]
             for kind in PASSES}
    forward, backward = times[Kind.FORWARD], times[Kind.BACKWARD] or times[Kind.FORWARD]
    if not forward:
        return lane[0].intervals[0].begin_s, lane[0].intervals[-1].end_s
    if module == LANGUAGE or not times[Kind.BACKWARD]:
        return min(begin for begin, _ in forward), max(end for _, end in backward)
    return min(begin for begin, _ in backward), max(end for _, end in forward)


def split(steps: Sequence[RankStep], critical: str, ideal_s: float) -> dict[str, float]:
    """Seconds of a step by part, see the module's text; they sum to the mean step of the critical grid's ranks.

    Args:
        steps: of all ranks.
        critical: the grid whose time is split.
        ideal_s: `mean_pass_seconds` of it when it runs alone.
    """
    own = [step for step in steps if step.module == critical]
    others = spans_of((step for step in steps if step.module != critical), PASSES)
    everywhere = {kind: spans_of(steps, (kind,)) for kind in (Kind.DATA_WAIT, Kind.GRADIENT_SYNC, Kind.OPTIMIZER)}
    parts = dict.fromkeys(PARTS, 0.0)
    passes = 0.0
    for lane in sorted({step.lane for step in own}):
        ranks = [step for step in own if step.lane == lane]
        covers = {"others": others, "lane": spans_of(ranks, PASSES), "data": everywhere[Kind.DATA_WAIT],
                  "lanes": spans_of((step for step in own if step.lane != lane), PASSES),
                  "sync": everywhere[Kind.GRADIENT_SYNC], "update": everywhere[Kind.OPTIMIZER]}
        begin, end = steady_window(ranks, critical)
        for step in ranks:
            passes += pass_seconds(step)
            for each in step.intervals:
                _split_interval(each, (begin, end), covers, parts)
    parts = {name: seconds / len(own) for name, seconds in parts.items()}
    parts[IDEAL], parts[SLOWER] = ideal_s, passes / len(own) - ideal_s
    return parts


def _split_interval(each: Interval, window: Span, covers: Mapping[str, Sequence[Span]],
                    parts: dict[str, float]) -> None:
    """Charge one interval of a rank, passes left out."""
    kind = each.label.kind
    if kind in PASSES:
        return
    own = OWN_PART[kind]
    if kind not in WAITS:
        parts[own] += each.end_s - each.begin_s
        return
    begin, end = window
    for piece, causes in ((_overlap(each, (float("-inf"), begin)), _causes_before),
                          (_overlap(each, (begin, max(begin, end))), _causes_within),
                          (_overlap(each, (max(begin, end), float("inf"))), _causes_after)):
        if piece[1] > piece[0]:
            charge(piece, [(covers[name], part) for name, part in causes(kind)], own, parts)


def _overlap(each: Interval, window: Span) -> Span:
    return max(each.begin_s, window[0]), min(each.end_s, window[1])


Causes = list[tuple[str, str]]


def _causes_before(kind: Kind) -> Causes:
    """Before a lane has work: whoever is still without data keeps all waiting, then the other grid's first pass."""
    return [("data", DATA), ("others", FILL), ("lane", BUBBLE), ("lanes", IMBALANCE)]


def _causes_within(kind: Kind) -> Causes:
    """While it has work: a wait for the other grid is its longer microbatch, one for a stage is the pipeline's."""
    if kind == Kind.BRIDGE_WAIT:
        return [("others", IMBALANCE), ("lanes", IMBALANCE), ("lane", BUBBLE)]
    return [("lane", BUBBLE), ("others", IMBALANCE), ("lanes", IMBALANCE)]


def _causes_after(kind: Kind) -> Causes:
    """When its work is done: other stages, other lanes, then the other grid's last passes; at last the update."""
    if kind == Kind.BRIDGE_WAIT:
        return [("others", FILL), ("lane", BUBBLE), ("lanes", IMBALANCE)]
    if kind == Kind.GRADIENT_SYNC:
        return [("lane", BUBBLE), ("lanes", IMBALANCE)]
    return [("lane", BUBBLE), ("lanes", IMBALANCE), ("others", FILL), ("sync", GRADIENT_SYNC), ("update", OPTIMIZER),
            ("data", DATA)]



def alone_seconds(steps: Sequence[RankStep], module: str) -> float:
    """From the first pass of a grid that ran alone to the end of its last one, bubbles and stragglers included."""
    spans = spans_of((step for step in steps if step.module == module), PASSES)
    return spans[-1][1] - spans[0][0] if spans else 0.0
