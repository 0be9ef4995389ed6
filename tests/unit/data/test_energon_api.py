"""Names of Energon that the data code uses. A version without one of them fails here instead of inside a worker."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from megatron.energon import TaskEncoder, WorkerConfig, get_train_dataset
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.wrappers import PackingDataset


@pytest.mark.parametrize(("function", "names"), [
    (get_train_dataset, {"worker_config", "batch_size", "packing_buffer_size", "shuffle_buffer_size",
                         "max_samples_per_sequence", "task_encoder", "repeat", "shuffle_over_epochs_multiplier"}),
    (WorkerConfig, {"rank", "world_size", "num_workers", "seed_offset", "global_error_handler"}),
    (TaskEncoder.build_batch, {"batch_size", "batch_drop_last", "packing_buffer_size", "worker_config"}),
    (PackingDataset, {"buffer_size", "pre_packer", "final_packer", "sample_encoder", "worker_config"}),
])
def test_the_arguments_exist(function: Any, names: set[str]) -> None:
    assert names <= set(inspect.signature(function).parameters)


def test_a_worker_keeps_its_seed_when_ranks_and_workers_trade_places() -> None:
    """Routed and per-lane loaders rest on this: global worker ids and seeds depend on rank * workers + worker alone."""
    for rank, world_size, workers in ((0, 4, 2), (0, 2, 4), (0, 1, 8)):
        config = WorkerConfig(rank=rank, world_size=world_size, num_workers=workers, seed_offset=5)
        one = WorkerConfig(rank=1, world_size=8, num_workers=1, seed_offset=5)
        assert config.worker_seed(1) == one.worker_seed(0)


def test_states_hold_what_a_resumed_worker_needs() -> None:
    assert {"_worker_rng", "_pending_slices_offset", "_active_slice_state"} <= set(
        WebdatasetSampleLoaderDataset._savable_fields)
