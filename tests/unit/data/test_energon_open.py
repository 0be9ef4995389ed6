"""Shards stay open while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath

from data.energon.open import OPEN_SHARDS, leaves, train_dataset
from data.energon.provider import Config
from tests.support.shards import TextEncoder, open_reader, text_shards

SHARDS, SAMPLES = 60, 6


def test_a_pass_opens_each_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    open_file = EPath.open

    def noted_open(self: EPath, *arguments: Any, **options: Any) -> Any:
        opened.append(str(self))
        return open_file(self, *arguments, **options)

    monkeypatch.setattr(EPath, "open", noted_open)
    # In this process, where more shards are read than stay open.
    config = Config(data_path=str(text_shards(tmp_path, [SAMPLES] * SHARDS)), num_workers=0)
    reader = open_reader(config, [0], 1)
    keys = [reader.read(0).key for _ in range(SHARDS * SAMPLES)]
    reader.close()
    assert len(set(keys)) == SHARDS * SAMPLES
    shards = [name for name in opened if name.endswith(".tar")]
    assert len(set(shards)) == SHARDS
    # Now and then one is closed that is not drawn for long.
    assert len(shards) <= 1.05 * SHARDS


def test_open_shards_do_not_grow(tmp_path: Path) -> None:
    config = Config(data_path=str(text_shards(tmp_path, [40])), num_workers=1)
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=1)
    (leaf,) = leaves(train_dataset(config, worker_config, TextEncoder()))
    (shards,) = leaf.join_readers
    assert shards.itar_cache_size == OPEN_SHARDS
    for index in [*range(40)] * 2:
        assert shards[index] is not None
    (tar,) = shards.itar_files_cache.values()
    assert len(tar.members) == 1
    shards.close()
