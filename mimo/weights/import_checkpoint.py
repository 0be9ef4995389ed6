"""Converts a Hugging Face folder to a Megatron distributed checkpoint, in one process, one tensor group at a time."""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mimo.checkpoint.differences import model_fields
from mimo.checkpoint.paths import RELEASE, write_tracker
from mimo.checkpoint.state import weights_only_state
from mimo.checkpoint.writer import SummedStream, save_item, write_shared_files
from mimo.protocols import LANGUAGE, ModelProvider
from mimo.text import format_bytes
from mimo.weights.configuration import compare_folder
from mimo.weights.match import check_repeated, check_tensor, check_values, match_source, report
from mimo.weights.rules import Direct, Rule, StoredTensor
from mimo.weights.safetensors_io import MAX_SHARD_BYTES, HfSource, Progress

logger = logging.getLogger(__name__)
_UNFINISHED = ".saving_release"


@dataclass(frozen=True)
class ImportedTensor:
    """A global tensor of the new checkpoint, and how it is made.

    Attributes:
        key: key in the checkpoint.
        place: its place on the stacked axes.
        shape: shape without the stacked axes.
        dtype: dtype in the checkpoint.
        rule: rule that makes it.
        sources: names of the tensors that it is made of.
    """

    key: str
    place: StoredTensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    rule: Rule
    sources: tuple[str, ...]

    @property
    def offsets(self) -> torch.Size:
        """Offsets of its first element in the stacked tensor."""
        return torch.Size((*self.place.index, *(0 for _ in self.shape)))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def write_item(self) -> WriteItem:
        """Return its description for the distributed checkpoint."""
        sizes = torch.Size((*(1 for _ in self.place.axes), *self.shape))
        return WriteItem(
            MetadataIndex(self.key, self.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(self.offsets, sizes), properties=TensorProperties(dtype=self.dtype),
                size=torch.Size((*self.place.axes, *self.shape))))

    def make(self, source: HfSource, problems: list[str]) -> torch.Tensor:
        """Return its values, with the stacked axes. Add a line to `problems` for values that are not finite."""
        parts = [source.read(name, self.rule.row_slice) for name in self.sources]
        for name, part in zip(self.sources, parts, strict=True):
            problems += check_values(name, part, self.dtype)
        whole = self.rule.convert.to_megatron(parts)
        return whole.to(self.dtype).reshape((*(1 for _ in self.place.axes), *self.shape)).contiguous()


@torch.no_grad()
def import_hf(hf_dir: str | Path, save_dir: str | Path, provider: ModelProvider, family_config: Any,
              params_dtype: torch.dtype = torch.bfloat16, progress: Progress | None = None,
              config: str = "", allowed: Collection[str] = ()) -> Path:
    """Write a Hugging Face folder's weights as `SAVE/release`, a checkpoint of weights that --load takes.

    Args:
        hf_dir: folder of the whole model.
        save_dir: folder of checkpoints. It must not hold any yet.
        provider: the model family.
        family_config: its configuration.
        params_dtype: dtype of parameters, except of those that must stay float32.
        progress: called after each tensor.
        allowed: fields of the configuration that may differ from config.json (--allow-difference).
        config: flags of a run of this model as TOML, which `mimo export` and `mimo inspect` read.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: the source and the model do not fit, or values are not finite, with a list of everything that is
            wrong. Or `save_dir` has checkpoints already, or its disk is too small.
        OSError: `save_dir` cannot be written, for example because the disk is full.
    """
    root, source = Path(save_dir), HfSource(hf_dir)
    if root.is_dir() and any(root.glob("iter_*")) or (root / RELEASE).exists():
        raise ValueError(f"{root} already holds checkpoints; give a folder without")
    modules = (*provider.encoders(family_config), LANGUAGE)
    problems, notes = compare_folder(provider, family_config, source.path, modules, allowed)
    report(f"{source.path}: its weights belong to a model that computes something else", problems)
    for note in notes:
        logger.warning("%s", note)
    tensors = _plan(source, provider, family_config, params_dtype)
    # The folder gets its name when everything is in it, so that a folder `release` is always complete.
    folder = root / _UNFINISHED
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    needed, free = sum(tensor.num_bytes for tensor in tensors), shutil.disk_usage(root).free
    if free < needed:
        folder.rmdir()
        raise ValueError(f"{root}: the checkpoint needs {format_bytes(needed)}, and the disk has "
                         f"{format_bytes(free)} left")
    _, metadata = create_default_global_save_plan([SavePlan([tensor.write_item() for tensor in tensors])])
    try:
        written = _write_tensors(folder, tensors, source, progress, problems)
        report(f"{source.path} cannot be trained from", problems)
        write_shared_files(folder, metadata, written,
                           weights_only_state(modules, config, model_fields(provider, family_config)))
        folder.rename(root / RELEASE)
    except OSError as error:
        raise OSError(f"{root} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_tracker(root, RELEASE)
    return root / RELEASE


def _plan(source: HfSource, provider: ModelProvider, family_config: Any,
          params_dtype: torch.dtype) -> list[ImportedTensor]:
    """Plan every tensor of the checkpoint. Raises ValueError with everything that does not fit."""
    maps = {module: provider.weight_map(family_config, module)
            for module in (*provider.encoders(family_config), LANGUAGE)}
    matches, problems = match_source(source.catalog, maps, {})
    tensors = []
    for module, match in matches.items():
        problems += [f"missing: {name} (for {module} {rule.megatron})" for rule in maps[module].rules
                     if rule.megatron in match.absent for name in match.sources(rule)]
        stored = maps[module].stored()
        for name, rule in match.rules.items():
            dtype = torch.float32 if rule.keep_fp32 else params_dtype
            found = check_tensor(match, rule, source.catalog, None, dtype)
            problems += found
            sources = tuple(match.sources(rule))
            if not found and all(part in source.tensors for part in sources):
                shapes = rule.part_shapes(source.tensors[part].shape for part in sources)
                whole = rule.convert.to_megatron([torch.empty(shape, device="meta") for shape in shapes])
                tensors.append(ImportedTensor(f"{module}.{stored[name].key}", stored[name], tuple(whole.shape), dtype,
                                              rule, sources))
        # No model is built here, so it is not known which shape each single tensor should have, only which shapes the
        # module's parameters have.
        sizes = {tuple(shape.shape) for shape in provider.parameter_shapes(family_config, module)}
        for tensor in tensors:
            # If several rules make a parameter together, the provider lists the whole parameter. An expert in a tensor
            # of all experts is a parameter of its own, and converted.
            shape = tensor.shape
            if isinstance(tensor.rule.convert, Direct):
                shape = tensor.rule.tensor_shape(shape)
            # A tensor that stays float32 may be a buffer, which a provider does not list.
            if tensor.key.startswith(f"{module}.") and shape not in sizes and not tensor.rule.keep_fp32:
                problems.append(f"shape: {', '.join(tensor.sources)} make {list(shape)} for {tensor.rule.megatron}; no "
                                "parameter of the model has this shape")
    problems += _uneven(tensors)
    if not problems:
        problems = [line for module, match in matches.items() for line in check_repeated(source, match, maps[module])]
    report(f"{source.path} does not fit the model", problems)
    return tensors


def _uneven(tensors: list[ImportedTensor]) -> Iterator[str]:
    """Yield a line for each tensor whose shape differs from that of the same tensor in most other layers or experts."""
    alike: dict[str, list[ImportedTensor]] = {}
    for tensor in tensors:
        # The module is a part of the name, because two modules may have tensors of the same name.
        place = f"{tensor.key.partition('.')[0]}.{tensor.rule.megatron}"
        # Other numbers, such as those of Qwen3-VL's mergers, are of parts with sizes of their own.
        alike.setdefault(re.sub(r"\b(layers|experts)\.\d+\.", r"\1.N.", place), []).append(tensor)
    for group in alike.values():
        shapes = [tensor.shape for tensor in group]
        usual = max(shapes, key=shapes.count)
        example = group[shapes.index(usual)]
        for tensor in group:
            if tensor.shape != usual:
                yield (f"shape: {', '.join(tensor.sources)} make {list(tensor.shape)} for {tensor.rule.megatron}; "
                       f"{', '.join(example.sources)} make {list(usual)} for {example.rule.megatron}")


def _write_tensors(folder: Path, tensors: list[ImportedTensor], source: HfSource, progress: Progress | None,
                   problems: list[str]) -> list[list[Any]]:
    """Make and write one tensor at a time, into files of bounded size. torch's own writer keeps all tensors of a file.

    Returns:
        Every item with its place and checksum, see `write_shared_files`. Lines about wrong values go to `problems`.
    """
    written: list[list[Any]] = []
    left, num_files = deque(tensors), 0
    while left:
        name = f"__0_{num_files}.distcp"
        num_files += 1
        with (folder / name).open("wb") as file:
            stream = SummedStream(file)
            while left and file.tell() < MAX_SHARD_BYTES:
                tensor = left.popleft()
                save_item(tensor.make(source, problems), stream)
                written.append(stream.end_item(tensor.write_item(), name))
                if progress:
                    progress(len(written), len(tensors), tensor.key)
    return written
