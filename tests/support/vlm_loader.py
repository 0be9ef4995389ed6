"""Energon's own loader over the task encoder of image-text samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset

from data.energon.provider import Config
from data.energon.task_encoder import ErrorLog, VlmTaskEncoder
from mimo.protocols import DataRequest


def open_loader(path: Path, config: Config, asks: DataRequest, *, train: bool = False, rank: int = 0, world: int = 1,
                workers: int = 0, split: str = "") -> Any:
    """Return the rows of a prepared data set: in training order, or one pass in the order in which samples lie."""
    errors = ErrorLog(config.max_bad_samples)
    worker = WorkerConfig(
        rank=rank, world_size=world, num_workers=workers, seed_offset=asks.seed, global_error_handler=errors.handler
    )
    common: dict[str, Any] = {"worker_config": worker, "batch_size": None,
                              "packing_buffer_size": config.packing_buffer_size or None,
                              "task_encoder": VlmTaskEncoder(config, asks, errors)}
    if split:
        common["split_part"] = split
    if train:
        common |= {"shuffle_buffer_size": config.shuffle_buffer_size or None, "max_samples_per_sequence": 4}
    dataset = (get_train_dataset if train else get_val_dataset)(path, **common)
    return get_savable_loader(dataset, watchdog_timeout_seconds=None, watchdog_initial_timeout_seconds=None)
