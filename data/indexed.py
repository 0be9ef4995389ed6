"""Lane of a data set whose samples are a function of their global index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
            raise ValueError(f"the checkpoint's data state is not of an indexed data set: it holds "
                             f"{', '.join(sorted(map(str, state)))}; --no-load-data starts the data anew")
        total = int(state["consumed"]) * int(state["lanes"])
        consumed, left_over = divmod(total, self._lane.count)
        if left_over:
            raise ValueError(
                f"--llm-dp {self._lane.count}: cannot continue a run of --llm-dp {state['lanes']} after {total} "
                f"samples, which do not divide over {self._lane.count} lanes; keep --llm-dp or take a divisor"
            )
        self._consumed = consumed
