"""Choose which samples share a row of `--seq-length` tokens.

First-fit-decreasing (Johnson, 1973) needs at most 11/9 of the fewest possible packs plus one. Balanced packing keeps
that number of packs and evens out the encoder's work, which is the tokens of images in its layers, so that no lane
waits for another's images. It assigns samples longest-processing-time-first (Graham, 1969) or, if the packs are too
full for that, by MULTIFIT (Coffman, Garey and Johnson, 1978). Then it exchanges samples between the heaviest pack and
the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Rng = np.random.Generator | random.Random

# Limits for the time of balancing, during which nothing is read. With 1024 samples, a bound takes about 2 ms and an
# exchange 0.2 ms.
MAX_BOUNDS = 7
MAX_EXCHANGES = 150


@dataclass(frozen=True)
class Buffer:
    """Samples from which packs are chosen.

    Attributes:
        lengths: tokens of each sample, int64 `[N]`.
        costs: tokens of each sample in the encoder's layers, int64 `[N]`.
        capacity: most tokens of a pack.
    """

    lengths: np.ndarray
    costs: np.ndarray
    capacity: int

    def loads(self, pack_of: np.ndarray, num_packs: int) -> np.ndarray:
        """Sum the costs of each pack, int64 `[num_packs]`, from the pack of each sample."""
        return np.bincount(pack_of, self.costs, num_packs).astype(np.int64)


def shuffled(count: int, rng: Rng) -> np.ndarray:
    """Return the numbers below `count` in random order, int64."""
    if isinstance(rng, random.Random):
        order = list(range(count))
        rng.shuffle(order)
        return np.array(order, np.int64)
    return rng.permutation(count)


def checked(lengths: Sequence[int], costs: Sequence[int], capacity: int) -> Buffer:
    """Make a buffer of samples. Raises ValueError, with the index, for a length that is not within 1 to `capacity`."""
    sizes, weights = (np.asarray(values, np.int64).reshape(-1) for values in (lengths, costs))
    assert sizes.shape == weights.shape and (weights >= 0).all(), (sizes.shape, weights.shape)
    wrong = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if wrong.size:
        index = int(wrong[0])
        raise ValueError(f"sample {index} of the buffer has {sizes[index]} tokens: a pack holds 1 to {capacity}")
    return Buffer(sizes, weights, capacity)


def grouped(pack_of: np.ndarray, num_packs: int) -> list[list[int]]:
    """Return the indices of each pack, ascending, from the pack of each index."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    for index, pack in enumerate(pack_of.tolist()):
        packs[pack].append(index)
    return packs


def first_fit(buffer: Buffer, order: list[int], num_packs: int, bound: int) -> np.ndarray | None:
    """Assign each sample, in the given order, to the first pack that has room and stays within the cost `bound`.

    Returns:
        The pack of each sample, int64 `[N]`; None if a sample fits in none of `num_packs`.
    """
    free = np.full(num_packs, buffer.capacity, np.int64)
    left = np.full(num_packs, bound, np.int64)
    pack_of = np.empty(len(order), np.int64)
    for index in order:
        fits = (free >= buffer.lengths[index]) & (left >= buffer.costs[index])
        pack = fits.argmax()
        if not fits[pack]:
            return None
        free[pack] -= buffer.lengths[index]
        left[pack] -= buffer.costs[index]
        pack_of[index] = pack
    return pack_of


def first_fit_decreasing(buffer: Buffer, rng: Rng, num_first: int = 0) -> tuple[list[int], np.ndarray, int]:
    """Return samples by falling length (equal ones in random order), the pack of each, and the number of packs.

    The first `num_first` samples of the buffer come before all others. Packs are numbered at random.
    """
    order = shuffled(len(buffer.lengths), rng)
    order = order[np.lexsort((-buffer.lengths[order], order >= num_first))].tolist()
    pack_of = first_fit(buffer, order, len(order), int(buffer.costs.sum()))
    assert pack_of is not None
    num_packs = int(pack_of.max(initial=-1)) + 1
    return order, shuffled(num_packs, rng)[pack_of], num_packs


def select_packs(lengths: Sequence[int], capacity: int, rng: Rng, num_first: int = 0) -> list[list[int]]:
    """Choose packs by first-fit-decreasing. Equal lengths and the order of the packs are shuffled.

    Args:
        lengths: tokens of each sample.
        capacity: most tokens of a pack.
        rng: only source of randomness, seeded by the caller.
        num_first: number of samples, the first ones, that are assigned before all others.

    Returns:
        Indices into `lengths` of each pack, ascending; every index is in exactly one.

    Raises:
        ValueError: a length is not within 1 to `capacity`; the message names the index.
    """
    _, pack_of, num_packs = first_fit_decreasing(checked(lengths, [0] * len(lengths), capacity), rng, num_first)
    return grouped(pack_of, num_packs)


def spread(buffer: Buffer, num_packs: int) -> np.ndarray | None:
    """Assign the costliest samples first, each to the pack with room that has the fewest image tokens.

    Returns:
        The pack of each sample, int64 `[N]`; None if there is no room for a sample.
    """
    free = np.full(num_packs, buffer.capacity, np.int64)
    loads = np.zeros(num_packs, np.int64)
    pack_of = np.empty(len(buffer.lengths), np.int64)
    for index in np.lexsort((-buffer.lengths, -buffer.costs)).tolist():
        room = np.flatnonzero(free >= buffer.lengths[index])
        if not room.size:
            return None
        pack = room[loads[room].argmin()]
        free[pack] -= buffer.lengths[index]
        loads[pack] += buffer.costs[index]
        pack_of[index] = pack
    return pack_of


def bounded(buffer: Buffer, order: list[int], num_packs: int, heaviest: int) -> np.ndarray | None:
    """First-fit within the lowest bound on a pack's image tokens for which the packs suffice (MULTIFIT).

    Args:
        buffer: the samples.
        order: samples by falling length.
        num_packs: number of packs.
        heaviest: bound that is known to suffice and is to be improved.

    Returns:
        The pack of each sample, int64 `[N]`; None if no tried bound sufficed.
    """
    low, high = max(-(-int(buffer.costs.sum()) // num_packs), int(buffer.costs.max())), heaviest
    best = None
    for _ in range(MAX_BOUNDS):
        if low >= high:
            break
        middle = (low + high) // 2
        pack_of = first_fit(buffer, order, num_packs, middle)
        if pack_of is None:
            low = middle + 1
        else:
            best, high = pack_of, middle
    return best


def even_out(buffer: Buffer, pack_of: np.ndarray, num_packs: int) -> None:
    """Exchange samples in place, or move one, between the heaviest pack and others while this evens image tokens.

    Each step takes the exchange that lowers the sum of squares most and makes no pack as heavy as the heaviest was. If
    no exchange helps a pack, the next heaviest is tried, and this one again when another pack has changed. There are at
    most `MAX_EXCHANGES` steps.
    """
    # Each pack gets a sample without length and cost. An exchange with it moves the other sample.
    nothing = np.zeros(num_packs, np.int64)
    lengths, costs = np.concatenate([buffer.lengths, nothing]), np.concatenate([buffer.costs, nothing])
    packs = np.concatenate([pack_of, np.arange(num_packs)])
    loads = buffer.loads(pack_of, num_packs)
    free = buffer.capacity - np.bincount(packs, lengths, num_packs).astype(np.int64)
    stuck = np.zeros(num_packs, np.bool_)
    for _ in range(MAX_EXCHANGES):
        heavy = int(np.where(stuck, -1, loads).argmax())
        if stuck[heavy] or loads[heavy] <= loads.mean():
            break
        mine, others = np.flatnonzero((packs == heavy) & (costs > 0)), np.flatnonzero(packs != heavy)
        lights = packs[others]
        less, longer = costs[mine, None] - costs[others], lengths[mine, None] - lengths[others]
        fits = (longer <= free[lights]) & (-longer <= free[heavy])
        gain = np.where(fits, less * (loads[heavy] - loads[lights] - less), 0)
        if gain.max(initial=0) <= 0:
            stuck[heavy] = True
            continue
        row, column = np.unravel_index(gain.argmax(), gain.shape)
        light = lights[column]
        loads[[heavy, light]] += np.array([-1, 1]) * less[row, column]
        free[[heavy, light]] += np.array([1, -1]) * longer[row, column]
        packs[mine[row]] = light
        if others[column] < len(pack_of):
            packs[others[column]] = heavy
        stuck[:] = False
    pack_of[:] = packs[: len(pack_of)]


def select_balanced(
    lengths: Sequence[int], encoded_tokens: Sequence[int], capacity: int, rng: Rng
) -> tuple[list[list[int]], list[int]]:
    """Make as many packs as `select_packs` does, with about equal work for the encoder.

    Args:
        lengths: tokens of each sample, image tokens included.
        encoded_tokens: for each sample, the tokens of its images in the encoder's layers.
        capacity: most tokens of a pack.
        rng: only source of randomness, seeded by the caller.

    Returns:
        Indices into `lengths` of each pack, ascending; every index is in exactly one. Also the encoded tokens of the
        packs that `select_packs` would have made with an equal `rng`, whose imbalance is at least as large.

    Raises:
        ValueError: a length is not within 1 to `capacity`; the message names the index.
    """
    buffer = checked(lengths, encoded_tokens, capacity)
    order, plain, num_packs = first_fit_decreasing(buffer, rng)
    before = buffer.loads(plain, num_packs)
    if num_packs < 2:
        return grouped(plain, num_packs), before.tolist()
    starts = [spread(buffer, num_packs)]
    if starts[0] is None:
        starts = [bounded(buffer, order, num_packs, int(before.max())), plain.copy()]
    numbers = shuffled(num_packs, rng)
    # An assignment may leave a pack empty, but then rows would not correspond.
    full = [start for start in starts if start is not None and np.bincount(start, minlength=num_packs).all()]
    candidates = [plain] + [numbers[start] for start in full]
    for candidate in candidates[1:]:
        even_out(buffer, candidate, num_packs)
    balanced = min(candidates, key=lambda pack_of: sorted(buffer.loads(pack_of, num_packs).tolist(), reverse=True))
    return grouped(balanced, num_packs), before.tolist()


def select_from_buffer(
    lengths: Sequence[int], encoded_tokens: Sequence[int] | None, capacity: int, rng: Rng, num_waiting: int | None
) -> tuple[list[list[int]], list[int], list[int]]:
    """Choose the packs of a buffer that others follow, and the samples that wait for the next one.

    The samples of the emptiest pack wait if there is room for others, which the next buffer may have. No sample waits
    twice.

    Args:
        lengths: tokens of each sample, image tokens included.
        encoded_tokens: for packs with about equal work for the encoder, see `select_balanced`; None for others.
        capacity: most tokens of a pack.
        rng: only source of randomness, seeded by the caller.
        num_waiting: number of samples, the first ones, that have waited for this buffer; None if no buffer follows, so
            that none can wait.

    Returns:
        Indices into `lengths` of each pack, ascending; with `encoded_tokens` those of the packs without balancing, else
        nothing; and the indices of the samples that wait, ascending.

    Raises:
        ValueError: a length is not within 1 to `capacity`; the message names the index.
    """
    packs = []
    if encoded_tokens is None or num_waiting is not None:
        # Samples that have waited come first, so that none of them is in the emptiest pack.
        packs = select_packs(lengths, capacity, rng, num_waiting or 0)
    waiting: list[int] = []
    if num_waiting is not None and len(packs) > 1:
        most = capacity - min(lengths)  # fuller packs have no room even for the shortest sample
        sizes = [sum(lengths[index] for index in pack) for pack in packs]
        may_wait = [(size, pack) for size, pack in zip(sizes, packs, strict=True)
                    if pack[0] >= num_waiting and size <= most]
        waiting = min(may_wait, default=(0, waiting))[1]
    if encoded_tokens is None:
        return [pack for pack in packs if pack is not waiting], [], waiting
    kept = sorted(set(range(len(lengths))) - set(waiting))
    balanced, before = select_balanced([lengths[index] for index in kept], [encoded_tokens[index] for index in kept],
                                       capacity, rng)
    return [[kept[index] for index in pack] for pack in balanced], before, waiting


def utilisation(packs: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> float:
    """Return the share of the packs' room that holds tokens, 0 to 1; 1.0 without packs."""
    if not packs:
        return 1.0
    return sum(int(lengths[index]) for pack in packs for index in pack) / (len(packs) * capacity)


def imbalance(costs: Sequence[int]) -> float:
    """Return the largest cost over the mean, at least 1; 1.0 if there are no costs or all are zero."""
    total = sum(costs)
    return float(max(costs) * len(costs) / total) if total else 1.0
