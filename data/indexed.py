"""Samples and prompts that are a function of their global index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mimo.protocols import Lane, Sample


class IndexedStream:
    """Samples of one lane: global indices `lane.index`, `lane.index + lane.count`, ...

    Args:
        lane: the lane.
        build: function that returns the sample at a global index, counted from 0 without end.

    Raises:
        ValueError: the seed is negative, which NumPy's generators refuse.
    """

    def __init__(self, lane: Lane, build: Callable[[int], Sample]) -> None:
        assert 0 <= lane.index < lane.count, lane
        if lane.seed < 0:
            raise ValueError(f"--seed {lane.seed}: must not be negative")
        self._lane = lane
        self._build = build
        self._consumed = 0

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        sample = self._build(self._lane.index + self._consumed * self._lane.count)
        self._consumed += 1
        return sample

    def skip(self, count: int) -> None:
        """Skip `count` samples without building them."""
        self._consumed += count

    def state_dict(self) -> dict[str, Any]:
        """Return the number of delivered samples of this lane, and the number of lanes."""
        return {"consumed": self._consumed, "lanes": self._lane.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of any lane, because all lanes have the same position.

        Raises:
            ValueError: the state belongs to another kind of data set, or the number of lanes has changed and the
                consumed samples cannot be divided over the new number.
        """
        if not {"consumed", "lanes"} <= state.keys():
            raise ValueError(f"the checkpoint's data state does not belong to an indexed data set: it has "
                             f"{', '.join(sorted(map(str, state)))}; --no-load-data starts the data anew")
        total = int(state["consumed"]) * int(state["lanes"])
        consumed, left_over = divmod(total, self._lane.count)
        if left_over:
            raise ValueError(
                f"--llm-dp {self._lane.count}: cannot continue a run of --llm-dp {state['lanes']} after {total} "
                f"samples, which do not divide over {self._lane.count} lanes; keep --llm-dp or take a divisor"
            )
        self._consumed = consumed


class ShuffledRecords:
    """Records that every pass visits in another order, unless they are not shuffled.

    Args:
        count: number of records.
        seed, split: seed of the order; `train` or `valid`.
        shuffle: False visits them in the stored order in every pass.
        blocks: numbers of records of the blocks that can only be read as a whole, in stored order, if there are some.
        window: number of blocks whose records are mixed; a reader keeps as many.
    """

    def __init__(self, count: int, seed: int, split: str, *, shuffle: bool = True, blocks: Sequence[int] = (),
                 window: int = 1) -> None:
        assert not blocks or sum(blocks) == count, (count, blocks)
        self._starts, self._window = [0, *accumulate(blocks)], window
        self._is_kept, self._shuffle = np.ones(count, np.bool_), shuffle
        self._count = count
        self._seed = [seed, int(split == "valid")]
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        """Return the number of records of a pass."""
        return self._count

    def leave_out(self, keys: Collection[str], key_of: Callable[[int], str]) -> None:
        """Leave out the records of these names. The others keep their numbers, and their order in every pass."""
        for number in np.flatnonzero(self._is_kept).tolist():
            self._is_kept[number] = key_of(number) not in keys
        self._count, self._epoch = int(self._is_kept.sum()), -1

    def __getitem__(self, index: int) -> int:
        """Return the number of the record at an index, counted from 0 without end."""
        epoch, position = divmod(index, self._count)
        if self._epoch != epoch:
            self._epoch = epoch
            order = self._shuffled(epoch) if self._shuffle else np.arange(len(self._is_kept))
            # Records are left out of an order of all. A longer run may find more of them, and only what comes behind
            # such a record may move.
            self._order = order[self._is_kept[order]]
        return int(self._order[position])

    def _shuffled(self, epoch: int) -> np.ndarray:
        """Return the order of a pass over all records: blocks are shuffled, then the records of each window of them."""
        rng, num_blocks = np.random.default_rng([*self._seed, epoch]), len(self._starts) - 1
        if not num_blocks:
            return rng.permutation(len(self._is_kept))
        blocks = rng.permutation(num_blocks).tolist()
        return np.concatenate([rng.permutation(np.concatenate(
            [np.arange(self._starts[block], self._starts[block + 1]) for block in blocks[first:first + self._window]]))
            for first in range(0, num_blocks, self._window)])
