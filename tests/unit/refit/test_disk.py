"""A refit from disk around a small model: what is taken, what is refused and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mimo.refit.rendezvous import RefitError
from mimo.refit.tensor_slices import TensorMeta
from mimo.refit.transport import disk as manifest
from mimo.refit.transport.disk import Manifest, write_manifest
from mimo.rollout.engine import RolloutEngine, Sampling
from mimo.weights.safetensors_io import HfSource
from tests.support.echo_engine import engine_options
from tests.support.refit_faults import NAMES, PROMPTS, Ranks, is_right, refuses, scheme, whole_weights

pytestmark = pytest.mark.usefixtures("plain_engine")
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(root: Path, version: str, seed: int, change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
          named: dict[str, list[str]] | None = None) -> Path:
    """Write a version like a trainer, in two files, after applying `change` to its tensors."""
    tensors = whole_weights(seed)
    change(tensors)
    names = list(tensors)
    schemes = [scheme(names) | ({"styles": named} if named else {})]
    written = dict(zip(next(iter(named.values())) if named else names, tensors.values(), strict=True))
    folder = manifest.next_subfolder(root)
    folder.mkdir(parents=True)
    for file, part in zip(FILES, (list(written)[:4], list(written)[4:]), strict=True):
        save_file({name: written[name].contiguous() for name in part}, folder / file)
    entries = tuple(TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                    for name, tensor in written.items())
    write_manifest(folder, Manifest(version, entries, schemes,
                                    {file: (folder / file).stat().st_size for file in FILES}))
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_versions_are_loaded_one_after_the_other(tmp_path: Path, workers: int) -> None:
    engine = RolloutEngine(engine_options(workers))
    assert refuses(engine)
    for number in range(3):
        write(tmp_path, f"step {number}", number)
        assert engine.load_from_disk(str(tmp_path)) == engine.version == f"step {number}"
        assert is_right(engine, number)
    assert engine._llm.emptied == ["prefix", "mm", "encoder"] * 6
    assert engine.load_from_disk(str(tmp_path), "step 1") == "step 1"
    assert is_right(engine, 1)
    (answer, *_), *_ = engine.generate(PROMPTS, Sampling(max_tokens=1, temperature=0.0))
    assert answer.version == "step 1"


def test_each_worker_reads_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = HfSource.read
    monkeypatch.setattr(HfSource, "read", lambda self, name: read.append(name) or real(self, name))
    engine = RolloutEngine(engine_options())
    with torch.no_grad():
        engine._llm.workers[0].model.load_weights = Skipping(engine._llm.workers[0].model, "blocks.3.weight")
    write(tmp_path, "1", 0)
    with pytest.raises(RefitError, match="blocks.3.weight"):
        engine.load_from_disk(str(tmp_path))
    assert read == []
    other = RolloutEngine(engine_options())
    other.load_from_disk(str(tmp_path))
    assert sorted(read) == sorted(NAMES)


class Skipping:
    """A loader that passes over a tensor without a word."""

    def __init__(self, model: Any, name: str) -> None:
        self.real, self.name = model.load_weights, name

    def __call__(self, weights: Any) -> Any:
        return self.real((name, tensor) for name, tensor in weights if name != self.name)


def test_the_spelling_that_the_loader_wants_is_found(tmp_path: Path) -> None:
    schemes = {"plain": [f"model.{name}" for name in NAMES], "engine": list(NAMES)}
    engine = RolloutEngine(engine_options(2))
    write(tmp_path, "1", 4, named=schemes)
    engine.load_from_disk(str(tmp_path))
    assert is_right(engine, 4)


def cut(folder: Path) -> None:
    path = folder / FILES[1]
    path.write_bytes(path.read_bytes()[:-8])


def cut_as_announced(folder: Path) -> None:
    cut(folder)
    found = manifest.read_manifest(folder)
    sizes = {file: (folder / file).stat().st_size for file in FILES}
    write_manifest(folder, Manifest(found.version, found.entries, found.schemes, sizes))


def swap_shapes(folder: Path) -> None:
    tensors = load_file(folder / FILES[0])
    tensors["blocks.0.weight"] = tensors["blocks.0.weight"].reshape(4, 9).clone()
    save_file(tensors, folder / FILES[0])
    found = manifest.read_manifest(folder)
    sizes = {file: (folder / file).stat().st_size for file in FILES}
    write_manifest(folder, Manifest(found.version, found.entries, found.schemes, sizes))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda folder: (folder / manifest.MANIFEST).unlink(), "has no refit_manifest.json yet"),
    "half a manifest": (lambda folder: (folder / manifest.MANIFEST).write_text('{"format": 1'), "is damaged"),
    "missing file": (lambda folder: (folder / FILES[1]).unlink(), "is in the manifest and does not exist"),
    "truncated file": (cut, "bytes; its manifest says"),
    "file written as truncated": (cut_as_announced, "is truncated"),
    "another shape": (swap_shapes, r"\[6, 6\] in the manifest and float32 \[4, 9\] in the files"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_incomplete_weights_are_refused_and_the_old_ones_serve_on(tmp_path: Path, damage: str) -> None:
    engine = RolloutEngine(engine_options())
    write(tmp_path, "good", 0)
    engine.load_from_disk(str(tmp_path))
    spoil, error = DAMAGES[damage]
    spoil(write(tmp_path, "bad", 1))
    emptied = len(engine._llm.emptied)
    with pytest.raises(RefitError, match=error):
        engine.load_from_disk(str(tmp_path), "bad", timeout_s=0.1)
    assert engine.version == "good" and is_right(engine, 0) and len(engine._llm.emptied) == emptied


def without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["blocks.2.weight"]


def with_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["blocks.8.weight"] = torch.ones(6, 6)


def of_other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["blocks.1.weight"] = torch.ones(7, 6)


@pytest.mark.parametrize(("change", "name"), [
    (without, "blocks.2.weight"), (with_more, "blocks.8.weight"), (of_other_shape, "blocks.1.weight")])
def test_weights_of_another_model_are_refused_and_the_old_ones_serve_on(tmp_path, change, name):
    engine = RolloutEngine(engine_options())
    write(tmp_path, "good", 0)
    engine.load_from_disk(str(tmp_path))
    write(tmp_path, "other", 1, change)
    with pytest.raises(RefitError, match=name):
        engine.load_from_disk(str(tmp_path))
    assert engine.version == "good" and is_right(engine, 0)


def test_an_engine_whose_loading_breaks_off_refuses_until_one_succeeds(tmp_path, monkeypatch):
    engine = RolloutEngine(engine_options())
    write(tmp_path, "good", 0)
    engine.load_from_disk(str(tmp_path))
    write(tmp_path, "next", 1)

    def read(self: HfSource, name: str) -> torch.Tensor:
        if name == "blocks.5.weight":
            raise ValueError("the disk is gone")
        return real(self, name)

    real = HfSource.read
    with monkeypatch.context() as patch:
        patch.setattr(HfSource, "read", read)
        with pytest.raises(RefitError, match="the disk is gone"):
            engine.load_from_disk(str(tmp_path))
    assert engine.version is None and refuses(engine)
    with pytest.raises(RefitError, match="no complete weights"):
        engine._llm.workers[0].model.compute_logits(torch.ones(1, 6))
    engine.load_from_disk(str(tmp_path))
    assert engine.version == "next" and is_right(engine, 1)


def test_a_disk_and_a_trainer_take_turns(tmp_path: Path) -> None:
    ranks, engine = Ranks.of(2), RolloutEngine(engine_options(2))
    assert ranks.connect(engine, 2) == [None, None]
    for number in range(2):
        ranks.set(number)
        ranks.send(f"sent {number}")
        assert is_right(engine, number)
        write(tmp_path, f"written {number}", number + 5)
        assert engine.load_from_disk(str(tmp_path)) == f"written {number}"
        assert is_right(engine, number + 5)
