"""Dynamic microbatches: whole sequences packed up to a budget of tokens, equally many on every data-parallel rank.

Pure and deterministic: every rank computes the same plan from the lengths of all sequences.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_microbatches(lengths: Sequence[int], dp: int, max_tokens: int) -> list[list[list[int]]]:
    """Assign sequences to the microbatches of each data-parallel rank.

    All ranks get equally many microbatches, because they meet in collectives, and none is empty. There are about as few
    microbatches as possible, and never more than first fit decreasing needs. Microbatches with the same number on
    different ranks have about as many tokens, so that ranks wait little for each other.

    Args:
        lengths: tokens of each sequence, with its prompt and its own padding.
        dp: number of data-parallel ranks.
        max_tokens: `--max-tokens-per-microbatch`.

    Returns:
        For each rank and each of its microbatches, positions in `lengths` in ascending order.

    Raises:
        ValueError: a sequence is longer than a microbatch, or the sequences do not divide over the ranks.
    """
    for index, length in enumerate(lengths):
        assert length > 0, f"sequence {index} has {length} tokens"
    too_long = [index for index, length in enumerate(lengths) if length > max_tokens]
    if too_long:
        longest = max(too_long, key=lambda index: lengths[index])
        raise ValueError(
            f"--max-tokens-per-microbatch {max_tokens}: {len(too_long)} of {len(lengths)} sequences are longer, the "
            f"longest (number {longest}) has {lengths[longest]} tokens; it must be at least {lengths[longest]}, or "
            "prompts and completions shorter")
    if not lengths or len(lengths) % dp:
        raise ValueError(
            f"{len(lengths)} sequences do not divide over --llm-dp {dp}: every rank needs as many microbatches")
    bins = _fewest_bins(lengths, dp, max_tokens)
    # Sorted by size, neighbours become the k-th microbatches of all ranks. Every other row is reversed, so that the
    # first rank does not always get the fullest one.
    bins.sort(key=lambda members: (-_size(members, lengths), members))
    rows = [bins[start : start + dp] for start in range(0, len(bins), dp)]
    return [[row[rank if number % 2 == 0 else dp - 1 - rank] for number, row in enumerate(rows)] for rank in range(dp)]


def aligned(length: int, multiple: int) -> int:
    """Round up to a multiple, such as the tokens of a sequence with its own padding."""
    return -(-length // multiple) * multiple


def _fewest_bins(lengths: Sequence[int], dp: int, max_tokens: int) -> list[list[int]]:
    """Pack into a multiple of `dp` bins: as few as balanced packing needs, and no more than first fit does."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    packed = _first_fit(order, lengths, max_tokens)
    most = aligned(len(packed), dp)
    for count in range(aligned(-(-sum(lengths) // max_tokens), dp), most + 1, dp):
        bins = _balanced(order, lengths, count)
        if all(_size(members, lengths) <= max_tokens for members in bins):
            return [sorted(members) for members in bins]
    while len(packed) < most:
        # There are at least as many sequences as bins, so the fullest bin has two or more.
        packed.sort(key=lambda members: (-len(members), members))
        fullest = packed.pop(0)
        packed += [fullest[0::2], fullest[1::2]]
    return [sorted(members) for members in packed]


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack by first fit decreasing: put each sequence into the first bin that has room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        place = next((place for place, left in enumerate(room) if left >= lengths[index]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def _balanced(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Pack by longest processing time: put each sequence into the emptiest of `count` bins."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, place) for place in range(count)]
    for index in order:
        size, place = heapq.heappop(heap)
        bins[place].append(index)
        heapq.heappush(heap, (size + lengths[index], place))
    return bins


def _size(members: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in members)
