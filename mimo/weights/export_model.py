"""A Hugging Face folder from a running trainer, gathered tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel, named_modules_of
from mimo.protocols import ModelProvider
from mimo.weights.export import ExportOptions, PlannedRule, base_extras, plan_rules, write_companions
from mimo.weights.load import agree
from mimo.weights.pieces import ModelPiece, module_pieces
from mimo.weights.rules import WeightMap
from mimo.weights.source import HfSource
from mimo.weights.writer import Progress, Shard, ShardWriter, TensorInfo, check_empty, plan_shards, write_index

# Rank, slices and dtype of each piece that is gathered, and the whole tensor's shape.
_Held = tuple[int, tuple[slice, ...], tuple[int, ...], torch.dtype]


@torch.no_grad()
def export_model(built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any, out_dir: str | Path,
                 options: ExportOptions | None = None, progress: Progress | None = None) -> None:
    """Write the modules of a running trainer as a Hugging Face folder. Collective over the world.

    The first rank of each module gathers and writes that module's tensors, one at a time, into files of its own; the
    first rank of the world writes the index and everything else. All of them see the same folder.

    Args:
        built: this rank's model.
        grids: process groups.
        provider: the model family.
        family_config: its configuration.
        out_dir: folder to write; may exist, without weights.
        options: how.
        progress: told after each tensor that this rank writes.

    Raises:
        ValueError: on every rank, before anything is written: the weight map does not fit the model, the base is another
            model, or the folder has weights already.
    """
    options, out = options or ExportOptions(), Path(out_dir)
    # A gather of parameters that an overlapped step left open is finished first.
    built.model.disable_forward_pre_hook()
    built.model.enable_forward_pre_hook()
    maps = {module: provider.weight_map(family_config, module) for module in grids.layout.grids}
    pieces = {module: [piece for piece in module_pieces(part, grids.collections[module]) if piece.is_main]
              for module, part in named_modules_of(built.model)}
    held = _gather_places(pieces, grids)
    planned, base, problems = _plan(maps, held, provider, family_config, options, out, grids)
    agree(grids, f"export to {out}", problems)
    shards = _all_shards(planned, base, maps, options)
    for module, files in zip(planned, shards, strict=True):
        if grids.rank in grids.layout.grids[module].ranks:
            _write_module(planned[module], files, held[module], pieces[module], grids.collections[module].intra_dist_opt,
                          out, progress)
    extra_files = shards[len(planned):]
    first = dist.get_rank(grids.host) == 0
    if first and extra_files:
        _write_extras(extra_files[0], base, out)
    dist.barrier(group=grids.host)
    if first:
        everything = [shard for files in shards for shard in files]
        write_index(out, everything)
        infos = [info for rules in planned.values() for rule in rules for info in rule.infos]
        write_companions(out, base, None if base else provider.hf_config(family_config), infos)
    dist.barrier(group=grids.host)
