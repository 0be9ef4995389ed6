"""Random Hugging Face folders for any model family, and trainers that load, export and compare them; in workers."""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mimo.config.validate import validate
from mimo.protocols import LANGUAGE
from tests.support import deepseek, equality, hf_families
from tests.support.global_state import sharded_tensors
from tests.support.memory import peak_bytes
from tests.support.spawn import WorkerPool
from tests.support.stored import safetensors_of as read_folder

# A dense layer and three MoE layers: they are not stacked.
DEEPSEEK = {**deepseek.SIZES, "num_hidden_layers": 4, "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"]}
# Layers of every kind on either of two stages, and a depth of multi-token prediction.
HYBRID = """--model-provider nemotron_h --hybrid-layer-pattern ME*-ME*-/*E --vocab-size 90 --hidden-size 32
--num-attention-heads 4 --num-query-groups 2 --kv-channels 8 --ffn-hidden-size 48 --max-position-embeddings 64
--mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 6 --num-experts 4 --moe-router-topk 2
--moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 40 --moe-latent-size 16""".split()
# Model of a test -> flags over `equality.BASE`; 90 words, so that the vocabulary is padded.
MODELS: dict[str, tuple[str, ...]] = {
    "dense-tied": ("--vocab-size", "90", "--image-token-id", "89", "--no-untie-embeddings-and-output-weights",
                   "--add-qkv-bias", "--num-query-groups", "1", "--vision-patch-bias",
                   "--no-vision-class-token", "--no-vision-pre-layernorm",
                   "--vision-hidden-act", "gelu_tanh"),
    "moe": ("--vocab-size", "90", "--image-token-id", "89", "--qk-layernorm", *equality.MOE),
    "hybrid": tuple(HYBRID),
    "vlm": ("--model-provider", "nemotron-moe-vlm-tiny", "--hybrid-layer-pattern", "ME*-"),
}


def parse_config(*flags: str) -> Any:
    """Flags over the small mock model, or over a text model where they name its provider."""
    if not {"nemotron_h", "causal_lm"}.isdisjoint(flags):
        return equality.parse([*hf_families.BASE, *flags])
    return deepseek.parse_config(*flags) if "deepseek_v3" in flags else equality.parse_config(*flags)


@contextlib.contextmanager
def built_model(flags: tuple[str, ...], world_size: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    """This rank's (built model, grids, provider, family configuration)."""
    from mimo.grid.groups import Grids
    from mimo.model.build import build_model
    from mimo.platform import current_platform
    from mimo.registry import model_provider
    from mimo.watchdog.watchdog import Watchdog

    config = parse_config(*flags)
    provider = model_provider(config.model.model_provider)
    platform = current_platform()
    with Grids(validate(config, world_size), platform.backend) as grids:
        watchdog = Watchdog(config.train.watchdog_timeout_s, grids.describe())
        try:
            yield build_model(config, provider, grids, platform, watchdog), grids, provider, config.model_family
        finally:
            watchdog.close()


def family(flags: tuple[str, ...]) -> tuple[Any, Any]:
    """Provider and configuration that flags name, without building anything."""
    from mimo.registry import model_provider

    config = parse_config(*flags)
    return model_provider(config.model.model_provider), config.model_family


def alone(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Flags for one process that holds everything."""
    provider, config = family(flags)
    return (*flags, "--layout", "colocated") if provider.encoders(config) else flags


def held_pieces(built: Any, grids: Any) -> dict[str, list[Any]]:
    """This rank's pieces by module."""
    from mimo.model.build import named_modules_of
    from mimo.weights.match import module_pieces

    return {module: module_pieces(part, grids.collections[module]) for module, part in named_modules_of(built.model)}


def write_source(rank: int, flags: tuple[str, ...], folder: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """Write random tensors of the shapes of a one-process model to two files of a folder. Return their names."""
    with built_model(alone(flags), 1) as (built, grids, provider, config):
        shapes = {module: {piece.name: piece.shape for piece in pieces}
                  for module, pieces in held_pieces(built, grids).items()}
        maps = {module: provider.weight_map(config, module) for module in shapes}
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    for module, weight_map in maps.items():
        for rule in weight_map.rules:
            parts = rule.convert.to_hf(torch.empty(shapes[module][rule.megatron], device="meta"))
            for name, part in zip(rule.hf, parts, strict=True):
                noise = torch.randn(rule.tensor_shape(part.shape), generator=generator)
                tensors[weight_map.schemes[0].apply(name)] = noise if rule.keep_fp32 else noise.to(dtype)
    write_folder(Path(folder), tensors)
    return sorted(tensors)


def write_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Tensors in two files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    located = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        located |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": located}))


def expected_tensors(provider: Any, config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return whole Megatron tensors as `module name`, made of the source by the rules themselves."""
    source, expected = read_folder(folder), {}
    for module in (*provider.encoders(config), LANGUAGE):
        weight_map = provider.weight_map(config, module)
        scheme = weight_map.best_scheme(source)
        for rule in weight_map.rules:
            parts = [source[scheme.apply(name)] for name in rule.hf]
            if rule.rows is not None:
                parts = [part[rule.rows.first:rule.rows.first + rule.rows.count] for part in parts]
            expected[f"{module} {rule.megatron}"] = rule.convert.to_megatron(parts)
    return expected


def differences(built: Any, grids: Any, expected: dict[str, torch.Tensor]) -> tuple[list[str], int]:
    """Return names of this rank's pieces that are not bit-equal to their slice, and how many elements were compared."""
    wrong, count = [], 0
    for module, pieces in held_pieces(built, grids).items():
        for piece in pieces:
            slice_of = expected[f"{module} {piece.name}"][piece.box.slices].to(piece.tensor.dtype)
            count += piece.tensor.numel()
            if not torch.equal(slice_of, piece.tensor):
                wrong.append(f"{module} {piece.name}")
    return wrong, count


def num_elements(built: Any) -> int:
    """Elements of all parameters and persistent buffers of this rank."""
    return sum(value.numel() for value in built.model.state_dict().values() if isinstance(value, torch.Tensor))


def load_and_export(rank: int, flags: tuple[str, ...], world_size: int, folder: str,
                    out: str) -> tuple[list[str], int, int]:
    """Load a folder on this layout, export it again; gives wrong names, elements compared, elements of the model."""
    from mimo.weights.export import ExportOptions
    from mimo.weights.load import HfPaths, load_hf
    from tests.support.export_live import export_model

    with built_model(flags, world_size) as (built, grids, provider, config):
        load_hf(built, grids, provider, config, HfPaths(model=folder))
        wrong, count = differences(built, grids, expected_tensors(provider, config, Path(folder)))
        export_model(built, grids, provider, config, out, ExportOptions(base=folder, max_shard_bytes=20_000))
        return wrong, count, num_elements(built)


def load_release(rank: int, flags: tuple[str, ...], world_size: int, release: str,
                 folder: str) -> tuple[list[str], list[str], int, int]:
    """Read an imported checkpoint as Megatron Core does, in this layout.

    Gives keys whose global shape differs from the checkpoint's, wrong names, elements compared, elements of the model.
    """
    from megatron.core import dist_checkpointing

    from mimo.checkpoint.reader import read_index

    with built_model(flags, world_size) as (built, grids, provider, config):
        entries = sharded_entries(built, grids)
        for entry in entries.values():
            entry.data.zero_()
        stored = {key: tuple(value.size) for key, value in read_index(Path(release)).state_dict_metadata.items()}
        odd = [key for key in {entry.key for entry in entries.values()} ^ set(stored)] if world_size == 1 else []
        odd += [entry.key for entry in entries.values() if stored.get(entry.key) != tuple(entry.global_shape)]
        dist_checkpointing.load(dict(entries), release)  # in place
        wrong, count = differences(built, grids, expected_tensors(provider, config, Path(folder)))
        return odd, wrong, count, num_elements(built)


def sharded_entries(built: Any, grids: Any) -> dict[str, Any]:
    """Megatron Core's sharded tensors of this rank's modules under a live checkpoint's keys, factories applied."""
    from megatron.core.utils import unwrap_model

    from mimo.model.build import named_modules_of

    entries = {}
    for module, part in named_modules_of(built.model):
        groups = {"dp_cp_group": grids.collections[module].dp_cp}
        for entry in sharded_tensors(unwrap_model(part), prefix=f"{module}.", metadata=groups):
            entry.data = entry.data.detach()
            entries[str(len(entries))] = entry
    return entries


def save_live(rank: int, flags: tuple[str, ...], world_size: int, folder: str, release: str) -> None:
    """Load a folder on this layout and save the weights as Megatron Core does."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from mimo.weights.load import HfPaths, load_hf

    with built_model(flags, world_size) as (built, grids, provider, config):
        load_hf(built, grids, provider, config, HfPaths(model=folder))
        if rank == 0:
            Path(release).mkdir(parents=True)
        torch.distributed.barrier(group=grids.host)
        with pytest.MonkeyPatch.context() as patch:
            # Megatron Core's own is a process that outlives its worker.
            patch.setattr(filesystem_async, "_results_queue", queue.Queue())
            dist_checkpointing.save(sharded_entries(built, grids), release)


def import_folder(rank: int, flags: tuple[str, ...], folder: str, save: str, dtype: torch.dtype) -> str:
    """`import_hf` in a worker."""
    from mimo.weights.import_checkpoint import import_hf

    return str(import_hf(folder, save, *family(flags), dtype))


def export_release(rank: int, flags: tuple[str, ...], release: str, out: str, base: str) -> int:
    """`export_checkpoint` in a worker."""
    from mimo.weights.export import ExportOptions, export_checkpoint

    return export_checkpoint(release, out, *family(flags), ExportOptions(base=base, max_shard_bytes=30_000))


def export_errors(rank: int, flags: tuple[str, ...], release: str, out: str, base: str) -> list[str]:
    """Lines of the error of `export_release`: a worker that raised would be replaced, which takes long."""
    return error_lines(lambda: export_release(rank, flags, release, out, base))


def spoiled_loads(rank: int, flags: tuple[str, ...], folder: str) -> dict[str, list[str]]:
    """Return the errors of loads in which one source tensor is missing, renamed or of another shape, each in turn.

    A change of a tensor -> lines of the error; no line where the load went through.
    """
    from dataclasses import replace

    from mimo.weights import load
    from mimo.weights.safetensors_io import HfSource

    whole = HfSource(folder).catalog
    found = {}
    with built_model(alone(flags), 1) as (built, grids, provider, config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_fill", lambda *args: [])
        for name, entry in whole.tensors.items():
            rest = {other: value for other, value in whole.tensors.items() if other != name}
            shape = entry.shape
            changes = {"delete": rest, "rename": {**rest, f"{name}x": entry},
                       "grow": {**rest, name: replace(entry, shape=(shape[0] + 1, *shape[1:]))},
                       "widen": {**rest, name: replace(entry, shape=(*shape[:-1], shape[-1] * 2))},
                       "flatten": {**rest, name: replace(entry, shape=(*shape, 1))},
                       "quantize": {**rest, name: replace(entry, dtype=torch.float8_e4m3fn)}}
            for kind, tensors in changes.items():
                spoiled = replace(whole, tensors=tensors)
                patch.setattr(load, "_catalogs", lambda grids, paths, folders, spoiled=spoiled: {folders[0]: spoiled})
                found[f"{kind} {name}"] = error_lines(
                    lambda: load.load_hf(built, grids, provider, config, load.HfPaths(model=folder)))
    return found


def error_lines(call: Any) -> list[str]:
    """Lines of the error that a call raises, on this rank or with its word that another says why; else none."""
    from mimo.watchdog.process_exit import ReportedElsewhereError

    try:
        call()
    except (ValueError, ReportedElsewhereError) as error:
        return str(error).splitlines()
    return []


def spoiled_imports(rank: int, flags: tuple[str, ...], folder: str) -> dict[str, list[str]]:
    """Do what `spoiled_loads` does for an import without a model."""
    from dataclasses import replace

    from mimo.weights import import_checkpoint
    from mimo.weights.safetensors_io import HfSource

    provider, config = family(flags)
    source, found = HfSource(folder), {}
    whole = source.catalog
    for name, entry in whole.tensors.items():
        rest = {other: value for other, value in whole.tensors.items() if other != name}
        changes = {"delete": rest, "rename": {**rest, f"{name}x": entry},
                   "grow": {**rest, name: replace(entry, shape=(entry.shape[0] + 1, *entry.shape[1:]))},
                   "flatten": {**rest, name: replace(entry, shape=(*entry.shape, 1))}}
        for kind, tensors in changes.items():
            source.catalog = replace(whole, tensors=tensors)
            found[f"{kind} {name}"] = error_lines(
                lambda: import_checkpoint._plan(source, provider, config, torch.bfloat16))
    return found


def load_with_a_lost_file(rank: int, flags: tuple[str, ...], world_size: int, folder: str,
                          blind: int) -> tuple[list[str], bool]:
    """Rank `blind` does not find the files: what this rank's load says, and whether its weights are as before."""
    from mimo.weights import load

    with built_model(flags, world_size) as (built, grids, provider, config):
        before = {name: value.clone() for name, value in built.model.state_dict().items()
                  if isinstance(value, torch.Tensor)}
        with pytest.MonkeyPatch.context() as patch:
            if rank == blind:
                patch.setattr(load.HfSource, "missing_files", lambda self: ["gone.safetensors is not there"])
            lines = error_lines(lambda: load.load_hf(built, grids, provider, config, load.HfPaths(model=folder)))
        after = built.model.state_dict()
        return lines, all(torch.equal(value, after[name]) for name, value in before.items())


def load_modules(rank: int, flags: tuple[str, ...], world_size: int, paths: dict[str, str],
                 expected_of: dict[str, str]) -> tuple[dict[str, list[str]], list[str], list[str], int]:
    """Load modules from folders of their own.

    Gives what the report calls absent, the wrong names against the modules' whole folder, the names that changed, and
    reads of the source by this rank.
    """
    from mimo.weights.load import HfPaths, load_hf
    from mimo.weights.safetensors_io import HfSource

    with built_model(flags, world_size) as (built, grids, provider, config):
        before = [piece.tensor.clone() for pieces in held_pieces(built, grids).values() for piece in pieces]
        reads, read = [], HfSource.read

        def count(source: Any, name: str, rows: slice | None = None) -> torch.Tensor:
            reads.append(name)
            return read(source, name, rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HfSource, "read", count)
            report = load_hf(built, grids, provider, config, HfPaths(**paths))
        expected = {}
        for module, folder in expected_of.items():
            expected |= {name: value for name, value in expected_tensors(provider, config, Path(folder)).items()
                         if name.startswith(f"{module} ")}
        wrong, changed = [], []
        for module, pieces in held_pieces(built, grids).items():
            for piece in pieces:
                name = f"{module} {piece.name}"
                if name in expected and not torch.equal(expected[name][piece.box.slices].to(piece.tensor.dtype),
                                                        piece.tensor):
                    wrong.append(name)
                if not torch.equal(before.pop(0), piece.tensor):
                    changed.append(name)
        return report.absent, wrong, changed, len(reads)


def peaks(rank: int, flags: tuple[str, ...], folder: str, scratch: str) -> dict[str, int]:
    """Peak bytes of an import and of the export of what it wrote."""
    from mimo.weights.export import export_checkpoint
    from mimo.weights.import_checkpoint import import_hf

    provider, config = family(flags)
    done: list[tuple[int, int]] = []
    found = {"import": peak_bytes(lambda: import_hf(folder, f"{scratch}/save", provider, config, torch.float32,
                                                    lambda count, total, name: done.append((count, total))))}
    assert done == [(number + 1, len(done)) for number in range(len(done))]
    found["export"] = peak_bytes(lambda: export_checkpoint(f"{scratch}/save/release", f"{scratch}/out", provider,
                                                           config))
    return found


class Sources:
    """Random folders of the models, made when they are first asked for.

    Args:
        pool: where they are made.
        root: folder that holds them.
        more: flags of further models by name.
    """

    def __init__(self, pool: WorkerPool, root: Path, more: dict[str, tuple[str, ...]] | None = None) -> None:
        self.pool, self.root = pool, root
        (root / "deepseek-config").mkdir()
        (root / "deepseek-config" / "config.json").write_text(json.dumps(DEEPSEEK))
        deepseek_flags = ("--model-provider", "deepseek_v3", "--hf-config", str(root / "deepseek-config"))
        self.flags = MODELS | {"deepseek": deepseek_flags} | (more or {})

    def folder(self, model: str) -> Path:
        folder = self.root / model
        if not folder.exists():
            self.pool.run(write_source, self.flags[model], str(folder), world_size=1)
        return folder

    def release(self, model: str) -> Path:
        """The folder as a checkpoint."""
        save = self.root / f"{model}-imported"
        if not save.exists():
            self.pool.run(import_folder, self.flags[model], str(self.folder(model)), str(save), torch.float32,
                          world_size=1)
        return save / "release"
