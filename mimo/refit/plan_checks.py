"""Proof, before any byte moves, that a plan brings every wanted element once and leaves nothing out.

Each check lists everything that is wrong, by name. None of them needs a tensor or a collective.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from mimo.refit.plan import Op, described_box, wanted_slots
from mimo.refit.slots import DTYPE_BYTES, Box, Entry, Holders, Slot, Wants

# Lines of an error: a model that is another one altogether has tens of thousands of problems.
MAX_LINES = 100


def check_holders(entries: Sequence[Entry], holders: Holders) -> None:
    """Whether the trainer's ranks hold every element of every entry in exactly one box.

    Args:
        entries: the chunk plan's.
        holders: what the ranks hold.

    Raises:
        ValueError: names that are missing, left over or there twice, dtypes that cannot travel, boxes that overlap,
            lie outside the tensor or leave a gap, boxes without ranks.
    """
    known, problems = _known(entries)
    problems += [f"missing: no rank holds {name}" for name in known if name not in holders]
    problems += [f"left over: {name} is held and not in the chunk plan" for name in holders if name not in known]
    covers: dict[tuple[tuple[int, ...], tuple[Box, ...]], list[str]] = {}  # equal layers have equal boxes
    for name, entry in known.items():
        held = holders.get(name, [])
        boxes = tuple(each.box for each in held)
        if (entry.shape, boxes) not in covers:
            covers[entry.shape, boxes] = _cover_problems(Box.whole(entry.shape), boxes) if name in holders else []
        problems += [f"{name} {list(entry.shape)}: {line}" for line in covers[entry.shape, boxes]]
        problems += [f"{name} {described_box(each.box)}: ranks {list(each.ranks)} are not ascending numbers"
                     for each in held if not each.ranks or list(each.ranks) != sorted(set(each.ranks))]
    _report("what the trainer holds is not the model", problems)


def check_wants(entries: Sequence[Entry], wants: Wants, tensors: Mapping[str, tuple[str, int]] | None = None) -> None:
    """Whether a worker can take in what it wants.

    Args:
        entries: the chunk plan's.
        wants: what the worker takes in.
        tensors: dtype and number of elements of each live tensor of the worker; None where they are not at hand.

    Raises:
        ValueError: unknown names, boxes outside their tensor, names out of order or on two routes, targets that
            overlap or lie outside the live tensor, a live tensor of another dtype than comes over the wire.
    """
    known, problems = _known(entries)
    order = {name: number for number, name in enumerate(known)}
    for route, names in (("direct", [slot.name for slot in wants.direct]), ("loader", list(wants.loader))):
        problems += [f"unknown: {name} ({route}) is not in the chunk plan" for name in names if name not in known]
        numbers = [(order[name], name) for name in names if name in known]
        problems += [f"order: {after} ({route}) comes after {before}, which follows it in the chunk plan"
                     for (first, before), (second, after) in itertools.pairwise(numbers) if second < first]
    problems += [f"routes: {name} goes through the loader {count} times"
                 for name, count in Counter(wants.loader).items() if count > 1]
    direct = {slot.name for slot in wants.direct}
    problems += [f"routes: {name} is both direct and for the loader" for name in wants.loader if name in direct]
    fitting = []
    for slot in wants.direct:
        if slot.name in known:
            found = _slot_problems(slot, known[slot.name], tensors)
            problems += found
            fitting += [] if found else [slot]
    _report("what the worker wants does not fit", problems + _targets_that_overlap(fitting))


def check_plan(entries: Sequence[Entry], holders: Holders, wants: Wants, operations: Iterable[Op]) -> None:
    """Whether a worker's operations bring every element that it wants, once, to its place, and nothing else.

    Args:
        entries: the chunk plan's.
        holders: what the ranks of the trainer hold.
        wants: what the worker takes in.
        operations: what it receives, see `receive_plan`.

    Raises:
        ValueError: an operation of no wanted element or to another place, from a rank that does not hold it or of
            another entry; elements that come twice or not at all.
    """
    wanted: dict[str, list[tuple[Slot, list[Box]]]] = {
        name: [(slot, []) for slot in slots]
        for name, slots in wanted_slots(wants, {entry.name: entry for entry in entries}).items()}
    problems = []
    for each in operations:
        found = []
        if entries[each.entry].name != each.name:
            found.append(f"entry {each.entry} is {entries[each.entry].name}")
        if not any(each.sender in held.ranks and (held.box == each.box or _contains(held.box, each.box))
                   for held in holders.get(each.name, ())):
            found.append("that rank does not hold it")
        for slot, boxes in wanted.get(each.name, ()):
            if ((slot.box == each.box and slot.address == each.target)
                    or (_contains(slot.box, each.box) and slot.address.inside(slot.box, each.box) == each.target)):
                boxes.append(each.box)
                break
        else:
            found.append(f"not wanted at element {each.target.offset} of {each.target.tensor}")
        problems += [f"{each.name} {described_box(each.box)} from trainer rank {each.sender}: {line}" for line in found]
    for slot, boxes in itertools.chain.from_iterable(wanted.values()):
        if boxes != [slot.box]:
            problems += [f"{slot.name} {described_box(slot.box)} of {slot.address.tensor}: {line}"
                         for line in _cover_problems(slot.box, boxes)]
    _report("the plan does not bring what the worker wants", problems)


def bytes_needed(wants: Wants, entries: Sequence[Entry]) -> int:
    """Bytes on the wire of what a worker takes in: its boxes, and whole tensors for its loader."""
    known = {entry.name: entry for entry in entries}
    return (sum(slot.box.numel * DTYPE_BYTES[known[slot.name].dtype] for slot in wants.direct)
            + sum(known[name].num_bytes for name in wants.loader))


def bytes_moved(operations: Iterable[Op], entries: Sequence[Entry]) -> int:
    """Bytes of the boxes that operations carry, without the messages' alignment."""
    return sum(each.box.numel * DTYPE_BYTES[entries[each.entry].dtype] for each in operations)


def _known(entries: Sequence[Entry]) -> tuple[dict[str, Entry], list[str]]:
    """Entries by name, and what is wrong with them."""
    counts = Counter(entry.name for entry in entries)
    problems = [f"twice: {name} is in the chunk plan {count} times" for name, count in counts.items() if count > 1]
    for entry in entries:
        if entry.dtype not in DTYPE_BYTES:
            problems.append(f"dtype: {entry.name} is {entry.dtype}; known are {', '.join(DTYPE_BYTES)}")
        elif entry.keep_fp32 and entry.dtype != "float32":
            problems.append(f"dtype: {entry.name} must stay float32 and would travel as {entry.dtype}")
    return {entry.name: entry for entry in entries}, problems


def _cover_problems(whole: Box, boxes: Sequence[Box]) -> list[str]:
    """Why boxes are not a division of the whole."""
    problems = [f"{described_box(box)} lies outside" for box in boxes if not _contains(whole, box)]
    if problems:
        return problems
    ordered = sorted(boxes, key=lambda box: box.starts)
    for number, box in enumerate(ordered):
        for other in ordered[number + 1:]:
            if box.stops and other.starts[0] >= box.stops[0]:
                break
            if box.intersection(other) is not None:
                problems.append(f"{described_box(box)} and {described_box(other)} overlap")
    covered = sum(box.numel for box in boxes)
    if not problems and covered < whole.numel:
        problems.append(f"{whole.numel - covered} of {whole.numel} elements are missing")
    return problems


def _contains(outer: Box, inner: Box) -> bool:
    """Whether a box of the same tensor lies inside another."""
    return (len(outer.starts) == len(inner.starts) and all(map(int.__le__, outer.starts, inner.starts))
            and all(map(int.__le__, inner.starts, inner.stops)) and all(map(int.__le__, inner.stops, outer.stops)))


def _slot_problems(slot: Slot, entry: Entry, tensors: Mapping[str, tuple[str, int]] | None) -> list[str]:
    """Why a slot cannot take its box."""
    address, dimensions = slot.address, len(entry.shape)
    is_inside = len(slot.box.starts) == len(slot.box.stops) == dimensions and all(
        0 <= start < stop <= size
        for start, stop, size in zip(slot.box.starts, slot.box.stops, entry.shape, strict=True))
    is_placed = len(address.strides) == dimensions and address.offset >= 0 <= min(address.strides, default=0)
    if is_inside and is_placed and tensors is None:
        return []
    what = f"{slot.name} {described_box(slot.box)}"
    if not is_inside:
        return [f"shape: {what} is not a part of {list(entry.shape)}"]
    if not is_placed:
        return [f"target: {what} at element {address.offset} of {address.tensor} with strides {list(address.strides)}"]
    assert tensors is not None
    if address.tensor not in tensors:
        return [f"target: {what} goes to {address.tensor}, which is not there"]
    dtype, numel = tensors[address.tensor]
    problems = []
    if dtype != entry.dtype:
        problems.append(f"dtype: {what} comes as {entry.dtype}, {address.tensor} is {dtype}")
    last = _runs(slot)[-1][1]
    if last > numel:
        problems.append(f"target: {what} ends at element {last} of {address.tensor}, which has {numel}")
    return problems


def _targets_that_overlap(slots: Iterable[Slot]) -> list[str]:
    """Pairs of slots that would write the same elements of a live tensor."""
    by_tensor: dict[str, list[tuple[int, int, Slot]]] = {}
    for slot in slots:
        by_tensor.setdefault(slot.address.tensor, []).extend((*run, slot) for run in _runs(slot))
    problems: dict[str, None] = {}
    for tensor, runs in by_tensor.items():
        runs.sort(key=lambda run: run[:2])
        for (_, stop, slot), (start, _, other) in itertools.pairwise(runs):
            if start < stop:
                problems[f"target: {slot.name} {described_box(slot.box)} and {other.name} {described_box(other.box)} "
                         f"are both written to {tensor}"] = None
    return list(problems)


def _runs(slot: Slot) -> list[tuple[int, int]]:
    """The elements of the live tensor that a slot writes, as runs of consecutive ones: first and one past the last."""
    first = slot.address.offset
    length, starts = _relative_runs(slot.box.sizes, slot.address.strides)
    return [(first + start, first + start + length) for start in starts]


@lru_cache(maxsize=1024)  # layers and experts are alike
def _relative_runs(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, list[int]]:
    """Length and starts, ascending, of the runs of a box whose first element is number 0."""
    length = 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride == length and not outer:
            length *= size
        elif size > 1:
            outer.append((stride, size))
    return length, sorted(map(sum, itertools.product(*([stride * step for step in range(size)]
                                                       for stride, size in outer))))


def _report(what: str, problems: Iterable[str]) -> None:
    """Raise one ValueError with every line; nothing happens where there are none."""
    lines = list(dict.fromkeys(problems))
    if lines:
        more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
        raise ValueError(f"{what} ({len(lines)} {'problem' if len(lines) == 1 else 'problems'}):\n  "
                         + "\n  ".join(lines[:MAX_LINES] + more))
