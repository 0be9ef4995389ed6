"""Read the validation split sample by sample, in its own order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig

from data.energon.open import leaf_range, leaves, valid_datasets
from data.energon.provider import Config, path_of
from data.energon.reader import BadSamples, Encoding
from data.energon.worker_status import WorkerStatus, WorkerStatusTable, watch
from data.energon.workers import ONE_WORKER
from mimo.protocols import DataRequest, Sample

FORMAT = "energon valid"


class ValidReader:
    """Some lanes of the validation split, which repeats without end: lane l of L holds samples l, l + L, l + 2L, ...

    It reads in this process, and only the samples of its lanes. A sample that cannot be used becomes a row without
    targets, so that no other sample moves to another lane or is counted twice.

    Args:
        config: the data set's flags, without packing.
        request: the run's model and sizes.
        lanes: lane numbers.
        encoding: how samples become rows.

    Raises:
        ValueError: the split cannot be opened, or is empty.
    """

    def __init__(self, config: Config, request: DataRequest, lanes: Sequence[int], encoding: Encoding) -> None:
        assert not config.packing_buffer_size, config.packing_buffer_size
        self._request, self._encoding = request, encoding
        self._worker_config = WorkerConfig(
            rank=0, world_size=1, num_workers=0, seed_offset=request.seed, global_error_handler=encoding.on_error
        )
        self._datasets = valid_datasets(config, self._worker_config, encoding.encoder)
        self._leaves = [leaf for dataset in self._datasets for leaf in leaves(dataset)]
        assert len(self._leaves) == len(self._datasets), "one data set for each source"
        self._ranges = [leaf_range(leaf) for leaf in self._leaves]
        self._starts = [0, *accumulate(len(samples) for samples in self._ranges)]
        if not self._starts[-1]:
            raise ValueError("{} {}: has no sample to validate on".format(*path_of(config, "valid")))
        self._statuses = WorkerStatusTable([0])
        status = WorkerStatus(self._statuses)
        status.worker = 0
        for dataset in self._datasets:
            watch(dataset, status)
        self._bad = BadSamples(config.max_bad_samples)
        self._positions = dict.fromkeys(sorted(lanes), 0)

    def start(self) -> None:
        """Do nothing, because there is no worker to start."""

    def read(self, lane: int) -> Sample:
        """Return the next row of a lane. Raises ValueError for a shard that cannot be read, or too many bad samples."""
        index = (lane + self._request.num_lanes * self._positions[lane]) % self._starts[-1]
        row = self._row(index)
        self._positions[lane] += 1
        if row is None:
            return self._empty(index)
        self._bad.add(row.skipped)
        return self._encoding.to_sample(row)

    def _row(self, index: int) -> Any:
        """Return the row of a sample, or None if it cannot be used or the split excludes it."""
        source = bisect_right(self._starts, index) - 1
        position = self._ranges[source].start + index - self._starts[source]
        leaf = self._leaves[source]
        # Its single worker reads a slice with this one sample.
        leaf.reset_state_own()
        leaf.slice_offsets = (position, position + 1)
        with ONE_WORKER:
            self._worker_config.worker_activate(index)
            try:
                return next(iter(self._datasets[source]), None)
            finally:
                self._worker_config.worker_deactivate()

    def _empty(self, index: int) -> Sample:
        """Return a row without targets."""
        token = 1 if self._request.tokens.image_token_id == 0 else 0
        return Sample(f"valid/{index} (not usable)", np.array([token]), np.array([False]), images=[])

    def mark(self) -> dict[int, int]:
        """Return the number of rows that each lane has read."""
        return dict(self._positions)

    def state_dict(self, mark: dict[int, int]) -> dict[int, dict[str, Any]]:
        return {
            lane: {"format": FORMAT, "lanes": self._request.num_lanes, "position": position}
            for lane, position in mark.items()
        }

    def load_state_dict(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Continue each lane. Raises ValueError for states of another data set, or another number of lanes."""
        for state in states.values():
            if state.get("format") != FORMAT:
                raise ValueError(f"not the state of a validation split: it holds {', '.join(sorted(map(str, state)))}")
            if state["lanes"] != self._request.num_lanes:
                raise ValueError(f"--llm-dp {self._request.num_lanes}: the state belongs to {state['lanes']} lanes")
        for lane in self._positions:
            self._positions[lane] = int(states[lane]["position"])

    def describe(self) -> str:
        _, seconds, text = self._statuses.read(0)
        return f"validation split, read in the training process, for {seconds:.0f} s: {text}"

    def close(self) -> None:
        for leaf in self._leaves:
            for reader in leaf.join_readers:
                reader.close()
