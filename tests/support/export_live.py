"""Write the modules of a running trainer as a Hugging Face folder, gathered tensor by tensor, to compare with."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mimo.boxes import Box, is_partition
from mimo.comm.host import gather
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel, named_modules_of
from mimo.protocols import ModelProvider
from mimo.weights.export import ExportOptions, ExportPlan, PlannedRule, converted, infos_of, write_tensors
from mimo.weights.load import agree
from mimo.weights.match import ModelPiece, module_pieces
from mimo.weights.rules import WeightMap
from mimo.weights.safetensors_io import Progress, Shard, ShardWriter, plan_shards


@dataclass(frozen=True)
class HeldBox:
    """A piece of a whole tensor and the rank that holds it.

    Attributes:
        rank: global rank.
        box: the piece in the whole tensor.
        shape: shape of the whole tensor.
        dtype: its dtype.
    """

    rank: int
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


# The writer of tensors that are copied from the base; no module has this name.
EXTRAS = "(base)"
HeldBoxes = dict[str, dict[str, list[HeldBox]]]
"""Module -> Megatron name -> the pieces that make it up, in one order on every rank."""


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
        ValueError: on every rank, with no file published: the weight map does not fit the model, the base is another
            model, the folder has weights already or cannot be written.
    """
    options, out = options or ExportOptions(), Path(out_dir)
    built.finish_gathers("an export")
    pieces = {module: {(piece.name, piece.box): piece
                       for piece in module_pieces(part, grids.collections[module]) if piece.is_main}
              for module, part in named_modules_of(built.model)}
    held_boxes = _gather_boxes(pieces, grids)
    plan, shards = _plan(grids, held_boxes, provider, family_config, options, out)
    with contextlib.ExitStack() as stack:
        writers, problems = _open_writers(dict(zip((*plan.rules, EXTRAS), shards, strict=True)), grids, out, stack)
        agree(grids, f"{out} cannot be written", problems)
        for module, rules in plan.rules.items():
            if module in grids.modules:
                group = grids.collections[module].intra_dist_opt
                wholes = _whole_tensors(rules, held_boxes[module], pieces[module], group)
                problems += _write(writers.get(module), converted(wholes, problems), progress)
        if EXTRAS in writers:
            problems += _write(writers[EXTRAS], plan.base_tensors(problems), progress)
        agree(grids, f"{out} cannot be written", problems)
        for writer in writers.values():
            writer.publish()
    dist.barrier(group=grids.host)
    if dist.get_rank(grids.host) == 0:
        plan.finish(out, itertools.chain(*shards))
    dist.barrier(group=grids.host)


def _gather_boxes(pieces: Mapping[str, Mapping[Any, ModelPiece]], grids: Grids) -> HeldBoxes:
    mine = [(module, piece.name, HeldBox(grids.rank, piece.box, piece.shape, piece.tensor.dtype))
            for module, held in pieces.items() for piece in held.values()]
    gathered = gather(grids, mine)
    held_boxes: HeldBoxes = {module: {} for module in grids.layout.grids}
    for module, name, one in (entry for entries in gathered for entry in entries):
        held_boxes[module].setdefault(name, []).append(one)
    for module_places in held_boxes.values():
        for held in module_places.values():
            held.sort(key=lambda one: (one.rank, one.box.starts))
    return held_boxes


def _plan(grids: Grids, held_boxes: HeldBoxes, provider: ModelProvider, family_config: Any, options: ExportOptions,
          out: Path) -> tuple[ExportPlan, list[list[Shard]]]:
    """Return the plan, and the files of each module and, last, of the tensors copied from the base.

    Collective; raises ValueError on every rank where any rank cannot make it.
    """
    plan = ExportPlan({module: provider.weight_map(family_config, module) for module in grids.layout.grids}, options)
    problems: list[str] = []
    shards: list[list[Shard]] = []
    try:
        plan.open_base(out, provider, family_config)
    except ValueError as error:
        problems.append(str(error))
    for module, weight_map in plan.maps.items():
        problems += _uncovered(module, weight_map, held_boxes[module])
        problems += plan.add_module(module, {name: (held[0].shape, held[0].dtype)
                                             for name, held in held_boxes[module].items()})
    try:
        if not problems:
            plan.add_base_tensors()
        shards = plan_shards([*map(infos_of, plan.rules.values()), plan.extras], options.max_shard_bytes)
    except ValueError as error:
        problems.append(str(error))
    agree(grids, f"the model cannot be exported to {out}", problems)
    return plan, shards


def _open_writers(shards: Mapping[str, list[Shard]], grids: Grids, out: Path,
                  stack: contextlib.ExitStack) -> tuple[dict[str, ShardWriter], list[str]]:
    """This rank's writers by module, and what went wrong."""
    chosen = {module: shards[module] for module in grids.modules
              if grids.collections[module].intra_dist_opt.rank() == 0}
    if dist.get_rank(grids.host) == 0 and shards[EXTRAS]:
        chosen[EXTRAS] = shards[EXTRAS]
    try:
        return {name: stack.enter_context(ShardWriter(out, files)) for name, files in chosen.items()}, []
    except OSError as error:
        return {}, [str(error)]


def _uncovered(module: str, weight_map: WeightMap, held_boxes: Mapping[str, Sequence[HeldBox]]) -> Iterator[str]:
    """Yield a line for each tensor that the map and the model do not share, and for each whose pieces leave gaps."""
    names = {rule.megatron for rule in weight_map.rules}
    for name in sorted(names - held_boxes.keys()):
        yield f"no parameter: {module} {name} of the weight map is not in the model"
    for name, held in held_boxes.items():
        if name not in names:
            yield f"no rule: {module} {name} {list(held[0].shape)} of the model is in no rule of its weight map"
        if not is_partition(Box.whole(held[0].shape), (one.box for one in held)):
            yield f"not whole: the ranks together do not hold all of {module} {name} {list(held[0].shape)}"


def _whole_tensors(rules: Sequence[PlannedRule], held_boxes: Mapping[str, Sequence[HeldBox]],
                   pieces: Mapping[tuple[str, Box], ModelPiece],
                   group: Any) -> Iterator[tuple[PlannedRule, torch.Tensor]]:
    """Yield each rule's whole tensor on the CPU of the group's first rank, one at a time; nothing on the others."""
    writer, rank = dist.get_global_rank(group, 0), dist.get_rank()
    for rule in rules:
        name = rule.rule.megatron
        held = held_boxes[name]
        whole = torch.empty(held[0].shape, dtype=held[0].dtype) if rank == writer else None
        for one in held:
            piece = pieces.get((name, one.box))
            if one.rank == rank and rank != writer:
                assert piece is not None
                # As bytes: every backend sends those.
                dist.send(piece.tensor.contiguous().flatten().view(torch.uint8), dst=writer, group=group)
            elif whole is not None and one.rank == rank:
                assert piece is not None
                whole[one.box.slices].copy_(piece.tensor)
            elif whole is not None:
                received = torch.empty(one.box.sizes, dtype=one.dtype, device=torch.cuda.current_device())
                dist.recv(received.flatten().view(torch.uint8), src=one.rank, group=group)
                whole[one.box.slices].copy_(received)
        if whole is not None:
            yield rule, whole


def _write(writer: ShardWriter | None, tensors: Iterator[tuple[str, torch.Tensor, int]],
           progress: Progress | None) -> list[str]:
    """Write rows as they come; returns what went wrong. A rank without a writer has no tensors and only sends."""
    try:
        if writer is not None:
            write_tensors(writer, tensors, progress)
        return []
    except OSError as error:
        return [str(error)]
    finally:
        # Take in the rest after an error too: the other ranks are sending it.
        deque(tensors, maxlen=0)
