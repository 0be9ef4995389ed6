"""The streaming writer against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mimo.weights.safetensors_io import HfSource, Shard, ShardWriter, TensorInfo, check_empty, plan_shards, write_index

# An odd number of 2-byte elements comes before 4- and 8-byte ones.
TENSORS = {"half": torch.arange(3, dtype=torch.bfloat16), "scalar": torch.tensor(2.5),
           "flag": torch.tensor([True, False, True]), "wide": torch.arange(4, dtype=torch.float64).view(2, 2),
           "empty": torch.empty(0, 3, dtype=torch.float16), "ids": torch.arange(5),
           "name with \u00fc": torch.randn(3, 4)}


def infos_of(tensors: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def write(folder: Path, shards: list[Shard], tensors: dict[str, torch.Tensor]) -> None:
    with ShardWriter(folder, shards) as writer:
        for name, tensor in reversed(tensors.items()):  # any order
            writer.write(name, tensor)
        writer.finish()
        assert not list(folder.glob("model*")), "nothing has its name before all is written"
        writer.publish()
    write_index(folder, shards)


@pytest.mark.parametrize("max_bytes", [1, 40, 10**9])
def test_the_library_reads_what_is_written(tmp_path: Path, max_bytes: int) -> None:
    shards = plan_shards(infos_of(TENSORS), max_bytes)
    write(tmp_path, shards, TENSORS)
    found = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                found[name] = file.get_tensor(name)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_single_file_has_no_index(tmp_path: Path) -> None:
    shards = plan_shards(infos_of(TENSORS))
    write(tmp_path, shards, TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_files_are_bounded_and_indexed(tmp_path: Path) -> None:
    shards = plan_shards(infos_of(TENSORS), 40)
    write(tmp_path, shards, TENSORS)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    assert index["weight_map"].keys() == TENSORS.keys()
    count = len(shards)
    assert [shard.file for shard in shards] == [
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for shard in shards:
        assert len(shard.tensors) == 1 or sum(info.num_bytes for info in shard.tensors) <= 40
    source = HfSource(tmp_path)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in TENSORS.items())
    assert source.read("wide", slice(1, 2)).tolist() == [[2.0, 3.0]]


def test_rows_are_written_as_they_come(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 2, 3), "b": torch.arange(4.0), "scalar": torch.tensor(1.0)}
    shards = plan_shards(infos_of(tensors))
    with ShardWriter(tmp_path, shards) as writer:
        assert not writer.write("a", tensors["a"][3:], 3)
        assert not writer.write("b", tensors["b"][:1])
        assert writer.write("b", tensors["b"][1:], 1)
        with pytest.raises(AssertionError, match="not written: .'a', 'scalar'"):
            writer.finish()
        assert writer.write("a", tensors["a"][:3]) and writer.write("scalar", tensors["scalar"])
        for name, rows, first in (("a", tensors["a"][:1], 5), ("b", tensors["b"][:2], 3)):
            with pytest.raises(AssertionError):
                writer.write(name, rows, first)  # past the end
        writer.finish()
        writer.publish()
    source = HfSource(tmp_path)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())


def test_a_row_that_is_written_twice_is_noticed(tmp_path: Path) -> None:
    shards = plan_shards(infos_of({"b": torch.arange(4.0)}))
    with ShardWriter(tmp_path, shards) as writer:
        writer.write("b", torch.arange(3.0))
        with pytest.raises(AssertionError):
            writer.write("b", torch.arange(2.0), 2)


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    shards = plan_shards(infos_of(TENSORS), 40)
    with pytest.raises(RuntimeError, match="stop"), ShardWriter(tmp_path, shards) as writer:
        writer.write("ids", TENSORS["ids"])
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_was_not_announced_or_not_written_is_noticed(tmp_path: Path) -> None:
    shards = plan_shards(infos_of(TENSORS))
    with ShardWriter(tmp_path, shards) as writer:
        with pytest.raises(AssertionError):
            writer.write("ids", TENSORS["ids"].float())
        with pytest.raises(AssertionError, match="not written"):
            writer.finish()


def test_tensors_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than one tensor would be called a$"):
        plan_shards([*infos_of({"a": torch.zeros(1)}), *infos_of({"a": torch.zeros(1)})])
    with pytest.raises(ValueError, match="c .torch.complex64."):
        plan_shards(infos_of({"c": torch.zeros(1, dtype=torch.complex64)}))
    (tmp_path / "model-00001-of-00009.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="already holds weights .model-00001-of-00009"):
        check_empty(tmp_path)
