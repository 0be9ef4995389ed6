"""Random Hugging Face folders for any model family, and trainers that load, export and compare them; in workers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mimo.config.validate import validate
from mimo.protocols import LANGUAGE
from tests.support import deepseek, equality

# A dense layer and three MoE layers: they are not stacked.
DEEPSEEK = {**deepseek.SIZES, "num_hidden_layers": 4, "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"]}
# Model of a test -> flags over `equality.BASE`; 90 words, so that the vocabulary is padded.
MODELS: dict[str, tuple[str, ...]] = {
    "dense-tied": ("--vocab-size", "90", "--image-token-id", "89", "--no-untie-embeddings-and-output-weights",
                   "--add-qkv-bias", "--num-query-groups", "1", "--vision-patch-bias",
                   "--no-vision-class-token", "--no-vision-pre-layernorm",
                   "--vision-hidden-act", "gelu_tanh"),
    "moe": ("--vocab-size", "90", "--image-token-id", "89", "--qk-layernorm", *equality.MOE),
}


def parse_config(*flags: str) -> Any:
    """Flags over the small mock model, or over DeepSeek-V3 where they name its provider."""
    return deepseek.parse_config(*flags) if "deepseek_v3" in flags else equality.parse_config(*flags)


@contextlib.contextmanager
def built_model(flags: tuple[str, ...], world_size: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    """This rank's (built model, grids, provider, family configuration)."""
    from mimo.grid.groups import Grids
    from mimo.model.build import build_model
    from mimo.observe.watchdog import Watchdog
    from mimo.platform import current_platform
    from mimo.registry import model_provider

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


def held_pieces(built: Any, grids: Any) -> dict[str, list[Any]]:
    """This rank's pieces by module."""
    from mimo.model.build import named_modules_of
    from mimo.weights.pieces import module_pieces

    return {module: module_pieces(part, grids.collections[module]) for module, part in named_modules_of(built.model)}


def write_source(rank: int, flags: tuple[str, ...], folder: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """A folder of random tensors in two files, as one process of the model says; gives the names."""
    alone = ("--layout", "colocated") if family(flags)[0].encoders(family(flags)[1]) else ()
    with built_model((*flags, *alone), 1) as (built, grids, provider, config):
        shapes = {module: {piece.name: piece.shape for piece in pieces}
                  for module, pieces in held_pieces(built, grids).items()}
        maps = {module: provider.weight_map(config, module) for module in shapes}
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    for module, weight_map in maps.items():
        for rule in weight_map.rules:
            parts = rule.convert.to_hf(torch.empty(shapes[module][rule.megatron], device="meta"))
            for name, part in zip(rule.hf, parts, strict=True):
                noise = torch.randn(part.shape, generator=generator)
                tensors[weight_map.styles[0].spell(name)] = noise if rule.keep_fp32 else noise.to(dtype)
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


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by the safetensors library alone."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def expected_tensors(provider: Any, config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Whole Megatron tensors as `module name`, made of the source by the rules themselves."""
    source, expected = read_folder(folder), {}
    for module in (*provider.encoders(config), LANGUAGE):
        weight_map = provider.weight_map(config, module)
        style = weight_map.best_style(source)
        for rule in weight_map.rules:
            parts = [source[style.spell(name)] for name in rule.hf]
            expected[f"{module} {rule.megatron}"] = rule.convert.to_megatron(parts)
    return expected


def differences(built: Any, grids: Any, expected: dict[str, torch.Tensor]) -> tuple[list[str], int]:
    """Names of this rank's pieces that are not bit-equal to their slice, and how many elements were compared."""
    wrong, count = [], 0
    for module, pieces in held_pieces(built, grids).items():
        for piece in pieces:
            slice_of = expected[f"{module} {piece.name}"][piece.slices].to(piece.tensor.dtype)
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
    from mimo.weights.export_model import export_model
    from mimo.weights.load import HfPaths, load_hf

    with built_model(flags, world_size) as (built, grids, provider, config):
        load_hf(built, grids, provider, config, HfPaths(model=folder))
        wrong, count = differences(built, grids, expected_tensors(provider, config, Path(folder)))
        export_model(built, grids, provider, config, out, ExportOptions(base=folder, max_shard_bytes=20_000))
        return wrong, count, num_elements(built)


def load_release(rank: int, flags: tuple[str, ...], world_size: int, release: str,
                 folder: str) -> tuple[list[str], list[str], int, int]:
    """Read an imported checkpoint as the wheel does, in this layout.

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
    """The wheel's sharded tensors of this rank's modules under a live checkpoint's keys, factories applied."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.utils import unwrap_model

    from mimo.model.build import named_modules_of

    entries = {}
    for module, part in named_modules_of(built.model):
        state = unwrap_model(part).sharded_state_dict(
            prefix=f"{module}.", metadata={"dp_cp_group": grids.collections[module].dp_cp})
        apply_factories(state)
        for entry in nested_values(state):
            if isinstance(entry, ShardedTensor):
                entry.data = entry.data.detach()
                entries[str(len(entries))] = entry
    return entries


def save_live(rank: int, flags: tuple[str, ...], world_size: int, folder: str, release: str) -> None:
    """Load a folder on this layout and save the weights as the wheel does."""
    from megatron.core import dist_checkpointing

    from mimo.weights.load import HfPaths, load_hf

    with built_model(flags, world_size) as (built, grids, provider, config):
        load_hf(built, grids, provider, config, HfPaths(model=folder))
        if rank == 0:
            Path(release).mkdir(parents=True)
        torch.distributed.barrier(group=grids.host)
        dist_checkpointing.save(sharded_entries(built, grids), release)


def import_folder(rank: int, flags: tuple[str, ...], folder: str, save: str, dtype: torch.dtype) -> str:
    """`import_hf` in a worker."""
    from mimo.weights.import_checkpoint import import_hf

    return str(import_hf(folder, save, *family(flags), dtype))


def export_release(rank: int, flags: tuple[str, ...], release: str, out: str, base: str) -> int:
    """`export_checkpoint` in a worker."""
    from mimo.weights.export import ExportOptions, export_checkpoint

    return export_checkpoint(release, out, *family(flags), ExportOptions(base=base, max_shard_bytes=30_000))
