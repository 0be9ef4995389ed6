"""Plans a refit: intersects the trainer's boxes with those that workers want. Each end plans by itself.

Both ends know the entries of the chunk plan and which rank of the trainer holds which box. A worker plans what it
receives, and a rank of the trainer what it sends, so that no rank plans for all. Both plans have the same boxes in the
same order, entry by entry. The ends compare `digest`s before any byte moves, and `first_difference` describes where
they disagree.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Literal

from mimo.boxes import Box, View, consecutive_runs, contiguous_strides, moved_offset, partition_problems
from mimo.refit.tensor_slices import DTYPE_BYTES, Address, Holder, Holders, RecvSpec, TensorMeta, TensorSlice
from mimo.text import counted

# Most items of an error that is one line.
MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box that travels in a refit.

    Attributes:
        entry: number of its tensor in the chunk plan.
        name: name of the whole tensor.
        box: the box in the whole tensor.
        target: address to which a worker writes it: in a live tensor or, for a name that goes through the engine's
            loader, in a row-major tensor of that name.
    """

    entry: int
    name: str
    box: Box
    target: Address


@dataclass(frozen=True, slots=True)
class Op(Transfer):
    """A box that one rank of the trainer sends to one worker.

    Attributes:
        sender: rank of the trainer.
        receiver: index of the worker.
        source: address of the box on the sender, if it is planned there.
    """

    sender: int
    receiver: int
    source: Address | None = None


@dataclass(frozen=True, slots=True)
class Piece(Transfer):
    """A box that workers of one kind need and that one kind of trainer ranks holds.

    Attributes:
        ranks: ranks of the trainer that hold it, ascending; each worker gets it from one of them.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share(Transfer):
    """A box that one rank of the trainer sends to some workers of one kind.

    Attributes:
        receivers: indices of the workers that get it from this rank, ascending.
        source: address of the box on the sender.
    """

    receivers: Sequence[int]
    source: Address


def chunks(entries: Sequence[TensorMeta], max_bytes: int) -> list[range]:
    """Group consecutive entries into chunks that travel together; return the numbers of each chunk's entries.

    Args:
        entries: entries of the chunk plan.
        max_bytes: largest size of a chunk's whole tensors. A tensor larger than that is a chunk by itself.
    """
    found: list[range] = []
    first = size = 0
    for number, entry in enumerate(entries):
        if number > first and size + entry.num_bytes > max_bytes:
            found.append(range(first, number))
            first, size = number, 0
        size += entry.num_bytes
    return [*found, range(first, len(entries))] if entries else []


def receive_plan(entries: Sequence[TensorMeta], holders: Holders, spec: RecvSpec, receiver: int) -> list[Op]:
    """Plan what a worker receives, entry by entry.

    Raises:
        ValueError: the worker wants a tensor that is not in the chunk plan or that no rank holds.
    """
    return assigned(needed_pieces(entries, holders, spec, receiver), receiver)


def needed_pieces(entries: Sequence[TensorMeta], holders: Holders, spec: RecvSpec, receiver: int) -> list[Piece]:
    """Cut what a worker needs along the trainer's boxes, entry by entry. Workers of equal needs have equal pieces.

    The arguments and errors are those of `receive_plan`; only errors speak of `receiver`.
    """
    known = {entry.name: entry for entry in entries}
    missing = [name for name in (*(part.name for part in spec.direct), *spec.loader)
               if name not in known or name not in holders]
    if missing:
        raise ValueError(f"worker {receiver} wants tensors that the trainer does not have: {_listed(missing)}")
    wanted, overlaps = wanted_slices(spec, known), _Overlaps()
    found = []
    for number, entry in enumerate(entries):
        for part, held in itertools.product(wanted.get(entry.name, ()), holders[entry.name]):
            piece = overlaps.intersection(held.box, part.box)
            if piece is not None:
                found.append(Piece(number, entry.name, piece, overlaps.address(part.address, part.box, piece),
                                   held.ranks))
    return found


def assigned(pieces: Sequence[Piece], receiver: int) -> list[Op]:
    """Return the operations that bring these pieces to a worker."""
    return [Op(piece.entry, piece.name, piece.box, piece.target, sender, receiver)
            for piece, sender in zip(pieces, senders(pieces, receiver), strict=True)]


def senders(pieces: Iterable[Piece], receiver: int) -> list[int]:
    """Choose, for each piece, the rank that sends it to a worker. Entries take turns among the ranks that hold them."""
    turns: dict[int, int] = {}
    found = []
    for piece in pieces:
        count = len(piece.ranks)
        turn = turns.get(count)
        if turn is None:
            turn = turns[count] = _turn(receiver, count)
        found.append(piece.ranks[(turn + piece.entry) % count])
    return found


def send_plan(entries: Sequence[TensorMeta], holders: Holders, slices: Iterable[TensorSlice],
              specs: Mapping[int, RecvSpec], rank: int) -> list[Op]:
    """Plan what a rank of the trainer sends, entry by entry.

    Workers whose `specs` share one object are planned together. Names that this rank does not hold may be left out of
    them.

    Raises:
        ValueError: this rank does not hold what the holders say, or has a tensor that is not in the chunk plan.
    """
    return [Op(share.entry, share.name, share.box, share.target, rank, receiver, share.source)
            for share in shares(entries, holders, slices, specs, rank) for receiver in share.receivers]


def shares(entries: Sequence[TensorMeta], holders: Holders, slices: Iterable[TensorSlice],
           specs: Mapping[int, RecvSpec], rank: int) -> list[Share]:
    """Plan what a rank of the trainer sends, together for workers of equal needs.

    The arguments and errors are those of `send_plan`, which unfolds this plan.
    """
    own = _own_boxes(holders, slices, rank)
    numbers = {entry.name: number for number, entry in enumerate(entries) if entry.name in own}
    if len(numbers) < len(own):
        raise ValueError(f"trainer rank {rank} holds tensors that are not in the chunk plan: "
                         f"{_listed(sorted(own.keys() - numbers.keys()))}")
    alike: dict[int, list[int]] = {}
    for receiver in sorted(specs):
        alike.setdefault(id(specs[receiver]), []).append(receiver)
    held_entries = {name: entries[number] for name, number in numbers.items()}
    groups = [(wanted_slices(specs[receivers[0]], held_entries), _Takers(receivers, rank))
              for receivers in alike.values()]
    overlaps = _Overlaps()
    found = []
    for name, number in numbers.items():
        for wanted, takers in groups:
            for part, (held, address) in itertools.product(wanted.get(name, ()), own[name]):
                piece = overlaps.intersection(held.box, part.box)
                receivers = takers.taking(held.ranks, number) if piece is not None else ()
                if piece is not None and receivers:
                    found.append(Share(number, name, piece, overlaps.address(part.address, part.box, piece),
                                       receivers, overlaps.address(address, held.box, piece)))
    return found


def wanted_slices(spec: RecvSpec, entries: Mapping[str, TensorMeta]) -> dict[str, list[TensorSlice]]:
    """Select what a worker wants of some entries, by name: its own slices, or one of the whole for its loader."""
    found: dict[str, list[TensorSlice]] = {}
    for part in spec.direct:
        if part.name in entries:
            found.setdefault(part.name, []).append(part)
    for name in spec.loader:
        if name in entries:
            shape = entries[name].shape
            found.setdefault(name, []).append(
                TensorSlice(name, Box.whole(shape), Address(name, 0, contiguous_strides(shape))))
    return found


def grouped(operations: Iterable[Op], end: Literal["sender", "receiver"]) -> dict[int, list[Op]]:
    """Group operations by the rank or worker at one of their ends."""
    found: dict[int, list[Op]] = {}
    for operation in operations:
        found.setdefault(getattr(operation, end), []).append(operation)
    return found


def within(operations: Sequence[Op], chunk: range) -> Sequence[Op]:
    """Return the chunk's operations in plan order."""
    entry = attrgetter("entry")
    return operations[bisect_left(operations, chunk.start, key=entry):bisect_left(operations, chunk.stop, key=entry)]


def described(entries: Sequence[TensorMeta], operations: Iterable[Op]) -> list[str]:
    """Describe each operation: name, dtype, box, number of the entry, sender."""
    return [f"{each.name} {entries[each.entry].dtype} {each.box} of entry {each.entry} from trainer rank {each.sender}"
            for each in operations]


def encoded(entries: Sequence[TensorMeta], operations: Iterable[Op]) -> bytes:
    """Return the text of which a checksum of operations is made.

    Texts of parts of a plan, one after the other, are the text of the whole plan.
    """
    return "".join(f"{line}\n" for line in described(entries, operations)).encode()


def digest(entries: Sequence[TensorMeta], operations: Iterable[Op]) -> str:
    """Return a checksum that both ends share if they plan the same operations, names and dtypes in the same order."""
    return hashlib.sha256(encoded(entries, operations)).hexdigest()


def first_difference(mine: Sequence[str], theirs: Sequence[str], me: str, them: str) -> str:
    """Describe where two ends first disagree; empty if they agree.

    Operations are those of `described`, and the names of the ends such as `trainer rank 3`.
    """
    for number, (here, there) in enumerate(itertools.zip_longest(mine, theirs)):
        if here != there:
            return f"item {number}: {me} has {here or 'nothing more'}, {them} has {there or 'nothing more'}"
    return ""


class _Overlaps:
    """Intersections and their addresses, computed once for all equal layers and experts."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[tuple[int, ...], ...], Box | None] = {}
        self._moves: dict[tuple[tuple[int, ...], ...], int] = {}

    def intersection(self, held: Box, wanted: Box) -> Box | None:
        key = held.starts, held.stops, wanted.starts, wanted.stops
        if key not in self._pieces:
            self._pieces[key] = held.intersection(wanted)
        return self._pieces[key]

    def address(self, outer_address: Address, outer: Box, inner: Box) -> Address:
        """Return the address of a part of a box."""
        if inner.starts == outer.starts:
            return outer_address
        key = outer.starts, inner.starts, outer_address.strides
        if key not in self._moves:
            self._moves[key] = moved_offset(outer_address.strides, outer, inner)
        return Address(outer_address.tensor, outer_address.offset + self._moves[key], outer_address.strides)


class _Takers:
    """Chooses, among workers that want the same, those that take a box from a rank."""

    def __init__(self, receivers: Sequence[int], rank: int) -> None:
        self._receivers, self._rank = receivers, rank
        # Ranks of a holder -> number of this rank among them, and workers by their turn.
        self._turns: dict[tuple[int, ...], tuple[int, list[list[int]]]] = {}

    def taking(self, ranks: tuple[int, ...], number: int) -> list[int]:
        """Return the workers that take an entry's box from this rank, which is one of the `ranks` that hold it."""
        if ranks not in self._turns:
            turns: list[list[int]] = [[] for _ in ranks]
            for receiver in self._receivers:
                turns[_turn(receiver, len(ranks))].append(receiver)
            self._turns[ranks] = ranks.index(self._rank), turns
        place, turns = self._turns[ranks]
        return turns[(place - number) % len(ranks)]


def _turn(receiver: int, count: int) -> int:
    """Choose a replica of `count` for a worker: the sum of the digits of its index in base `count`.

    Indices of workers that want the same differ by a fixed distance, such as the tensor-parallel size. If that is a
    multiple of `count`, the index modulo `count` would give them all the same replica.
    """
    total = 0
    while receiver and count > 1:
        receiver, digit = divmod(receiver, count)
        total += digit
    return total % count


def _own_boxes(holders: Holders, slices: Iterable[TensorSlice], rank: int) -> dict[str, list[tuple[Holder, Address]]]:
    """Return the boxes that a rank holds, with their addresses, by name. Raises ValueError if its slices differ."""
    addresses = {(part.name, part.box): part.address for part in slices}
    own: dict[str, list[tuple[Holder, Address]]] = {}
    problems = []
    for name, boxes in holders.items():
        for held in boxes:
            if rank in held.ranks:
                address = addresses.pop((name, held.box), None)
                if address is None:
                    problems.append(f"{name} {held.box} should be there and is not")
                else:
                    own.setdefault(name, []).append((held, address))
    problems += [f"{name} {box} is there and should not be" for name, box in addresses]
    if problems:
        raise ValueError(f"trainer rank {rank} does not hold what was agreed on; its layout has changed, or ranks were "
                         f"mixed up: {_listed(problems)}")
    return own


def _listed(items: Iterable[str]) -> str:
    """Join items into one line, each once. Beyond `MAX_LISTED`, only their number is given."""
    items = list(dict.fromkeys(items))
    more = [f"and {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return "; ".join(items[:MAX_LISTED] + more)


# Checks, before any byte moves, that a plan brings every wanted element exactly once.
#
# Each check lists everything that is wrong, by name. None of them needs a tensor or a collective.


# Largest number of lines of an error. A completely different model has tens of thousands of problems.
MAX_LINES = 100


def holder_problems(entries: Sequence[TensorMeta], holders: Holders) -> list[str]:
    """Say why the trainer's ranks do not hold every element of every entry in exactly one box; empty if they do.

    Returns:
        A line for each name that is missing, left over or there twice, dtype that cannot travel, box that overlaps,
        lies outside the tensor or leaves a gap, and box without ranks.
    """
    known, problems = _known(entries)
    problems += [f"missing: no rank holds {name}" for name in known if name not in holders]
    problems += [f"left over: {name} is held and not in the chunk plan" for name in holders if name not in known]
    covers: dict[tuple[tuple[int, ...], tuple[Box, ...]], list[str]] = {}  # equal layers have equal boxes
    for name, entry in known.items():
        held = holders.get(name, [])
        boxes = tuple(each.box for each in held)
        if (entry.shape, boxes) not in covers:
            covers[entry.shape, boxes] = partition_problems(Box.whole(entry.shape), boxes) if name in holders else []
        problems += [f"{name} {list(entry.shape)}: {line}" for line in covers[entry.shape, boxes]]
        problems += [f"{name} {each.box}: ranks {list(each.ranks)} are not ascending numbers"
                     for each in held if not each.ranks or list(each.ranks) != sorted(set(each.ranks))]
    return problems


def check_holders(entries: Sequence[TensorMeta], holders: Holders) -> None:
    """Raise ValueError with all of `holder_problems`, if there are any."""
    _report("what the trainer holds is not the model", holder_problems(entries, holders))


def check_recv_spec(entries: Sequence[TensorMeta], spec: RecvSpec,
                    tensors: Mapping[str, tuple[str, int]] | None = None) -> None:
    """Check that a worker can take in what it wants.

    `tensors` has the dtype and the number of elements of each live tensor of the worker; None where they are not at
    hand.

    Raises:
        ValueError: unknown names, boxes outside their tensor, names out of order or on two routes, targets that
            overlap or lie outside the live tensor, a live tensor of another dtype than comes over the wire.
    """
    known, problems = _known(entries)
    order = {name: number for number, name in enumerate(known)}
    for route, names in (("direct", [part.name for part in spec.direct]), ("loader", list(spec.loader))):
        problems += [f"unknown: {name} ({route}) is not in the chunk plan" for name in names if name not in known]
        numbers = [(order[name], name) for name in names if name in known]
        problems += [f"order: {after} ({route}) comes after {before}, which follows it in the chunk plan"
                     for (first, before), (second, after) in itertools.pairwise(numbers) if second < first]
    problems += [f"routes: {name} goes through the loader {count} times"
                 for name, count in Counter(spec.loader).items() if count > 1]
    direct = {part.name for part in spec.direct}
    problems += [f"routes: {name} is both direct and for the loader" for name in spec.loader if name in direct]
    fitting = []
    for part in spec.direct:
        if part.name in known:
            found = _slice_problems(part, known[part.name], tensors)
            problems += found
            fitting += [] if found else [part]
    _report("what the worker wants does not fit", problems + _targets_that_overlap(fitting))


def check_plan(entries: Sequence[TensorMeta], holders: Holders, spec: RecvSpec, operations: Iterable[Op]) -> None:
    """Check that a worker's operations bring every element that it wants, once, to its place, and nothing else.

    Raises:
        ValueError: an operation of no wanted element or to another place, from a rank that does not hold it or of
            another entry; elements that come twice or not at all.
    """
    wanted: dict[str, list[tuple[TensorSlice, list[Box]]]] = {
        name: [(part, []) for part in slices]
        for name, slices in wanted_slices(spec, {entry.name: entry for entry in entries}).items()}
    problems = []
    for each in operations:
        found = []
        if entries[each.entry].name != each.name:
            found.append(f"entry {each.entry} is {entries[each.entry].name}")
        if not any(each.sender in held.ranks and (held.box == each.box or held.box.contains(each.box))
                   for held in holders.get(each.name, ())):
            found.append("that rank does not hold it")
        for part, boxes in wanted.get(each.name, ()):
            if ((part.box == each.box and part.address == each.target)
                    or (part.box.contains(each.box) and part.address.inside(part.box, each.box) == each.target)):
                boxes.append(each.box)
                break
        else:
            found.append(f"not wanted at element {each.target.offset} of {each.target.tensor}")
        problems += [f"{each.name} {each.box} from trainer rank {each.sender}: {line}" for line in found]
    for part, boxes in itertools.chain.from_iterable(wanted.values()):
        if boxes != [part.box]:
            problems += [f"{part.name} {part.box} of {part.address.tensor}: {line}"
                         for line in partition_problems(part.box, boxes)]
    _report("the plan does not bring what the worker wants", problems)


def bytes_needed(spec: RecvSpec, entries: Sequence[TensorMeta]) -> int:
    """Count the bytes on the wire that a worker takes in: its boxes, and whole tensors for its loader."""
    known = {entry.name: entry for entry in entries}
    return (sum(part.box.numel * DTYPE_BYTES[known[part.name].dtype] for part in spec.direct)
            + sum(known[name].num_bytes for name in spec.loader))


def bytes_moved(operations: Iterable[Op], entries: Sequence[TensorMeta]) -> int:
    """Count the bytes of the boxes that operations carry, without the messages' alignment."""
    return sum(each.box.numel * DTYPE_BYTES[entries[each.entry].dtype] for each in operations)


def _known(entries: Sequence[TensorMeta]) -> tuple[dict[str, TensorMeta], list[str]]:
    """Return entries by name, and a line for each that is wrong."""
    counts = Counter(entry.name for entry in entries)
    problems = [f"twice: {name} is in the chunk plan {count} times" for name, count in counts.items() if count > 1]
    for entry in entries:
        if entry.dtype not in DTYPE_BYTES:
            problems.append(f"dtype: {entry.name} is {entry.dtype}; known are {', '.join(DTYPE_BYTES)}")
        elif entry.keep_fp32 and entry.dtype != "float32":
            problems.append(f"dtype: {entry.name} must stay float32 and would travel as {entry.dtype}")
    return {entry.name: entry for entry in entries}, problems


def _slice_problems(part: TensorSlice, entry: TensorMeta, tensors: Mapping[str, tuple[str, int]] | None) -> list[str]:
    """Say why a slice cannot take its box; empty if it can."""
    address = part.address
    is_inside, is_placed, end = _fit(part.box, entry.shape, address.offset, address.strides)
    problems = []
    if not is_inside:
        problems.append(("shape", f"is not a part of {list(entry.shape)}"))
    elif not is_placed:
        problems.append(("target", f"at element {address.offset} of {address.tensor} with strides "
                                   f"{list(address.strides)}"))
    elif tensors is not None and address.tensor not in tensors:
        problems.append(("target", f"goes to {address.tensor}, which is not there"))
    elif tensors is not None:
        dtype, numel = tensors[address.tensor]
        if dtype != entry.dtype:
            problems.append(("dtype", f"comes as {entry.dtype}, {address.tensor} is {dtype}"))
        if end > numel:
            problems.append(("target", f"ends at element {end} of {address.tensor}, which has {numel}"))
    return [f"{kind}: {part.name} {part.box} {fault}" for kind, fault in problems]


@lru_cache(maxsize=4096)  # layers are alike
def _fit(box: Box, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> tuple[bool, bool, int]:
    """Return whether a box is a part of a tensor, whether it is placed well, and one past its last element there."""
    is_inside = len(box.starts) == len(box.stops) == len(shape) and all(
        0 <= start < stop <= size for start, stop, size in zip(box.starts, box.stops, shape, strict=True))
    is_placed = len(strides) == len(shape) and offset >= 0 <= min(strides, default=0)
    return is_inside, is_placed, View(offset, box.sizes, strides).end if is_inside and is_placed else 0


def _targets_that_overlap(slices: Iterable[TensorSlice]) -> list[str]:
    """List pairs of slices that would write the same elements of a live tensor."""
    by_tensor: dict[str, list[tuple[int, int, TensorSlice]]] = {}
    for part in slices:
        # Runs of consecutive elements: the first element and one past the last.
        length, starts = consecutive_runs(part.box.sizes, part.address.strides)
        by_tensor.setdefault(part.address.tensor, []).extend(
            (part.address.offset + start, part.address.offset + start + length, part) for start in starts)
    problems: dict[str, None] = {}
    for tensor, runs in by_tensor.items():
        runs.sort(key=lambda run: run[:2])
        for (_, stop, part), (start, _, other) in itertools.pairwise(runs):
            if start < stop:
                problems[f"target: {part.name} {part.box} and {other.name} {other.box} "
                         f"are both written to {tensor}"] = None
    return list(problems)


def _report(what: str, problems: Iterable[str]) -> None:
    """Raise one ValueError with all problems, if there are any."""
    lines = list(dict.fromkeys(problems))
    if lines:
        more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
        raise ValueError(f"{what} ({counted(len(lines), 'problem')}):\n  "
                         + "\n  ".join(lines[:MAX_LINES] + more))
