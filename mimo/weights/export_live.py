"""A Hugging Face folder from a running trainer, gathered tensor by tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mimo.boxes import Box, is_partition
from mimo.comm.host import gather
from mimo.grid.groups import Grids
from mimo.model.build import WEIGHTS, BuiltModel, named_modules_of
from mimo.protocols import ModelProvider
from mimo.weights.configuration import exported_configuration
from mimo.weights.export import ExportOptions, PlannedRule, base_extras, infos_of, plan_rules, write_companions
from mimo.weights.load import agree
from mimo.weights.match import ModelPiece, module_pieces
from mimo.weights.rules import WeightMap
from mimo.weights.safetensors_io import HfSource, Progress, Shard, ShardWriter, check_empty, plan_shards, write_index


@dataclass(frozen=True)
class HeldBox:
    """A piece of a whole tensor and the rank that holds it.

    Attributes:
        rank: global rank.
        box: the piece in the whole tensor.
        shape: of the whole tensor.
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


@dataclass
class _Plan:
    """Plan of an export, the same on every rank.

    Attributes:
        rules: each module's rules.
        shards: each module's files, and last those of the tensors copied from the base.
        base: the Hugging Face model that this one was made from, if given.
        configuration: config.json; None where the base has none.
    """

    rules: dict[str, list[PlannedRule]]
    shards: list[list[Shard]]
    base: HfSource | None
    configuration: dict[str, Any] | None


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
    built.residency.require("an export", WEIGHTS)
    # A gather of parameters that an overlapped step left open is finished first.
    built.model.disable_forward_pre_hook()
    built.model.enable_forward_pre_hook()
    pieces = {module: {(piece.name, piece.box): piece
                       for piece in module_pieces(part, grids.collections[module]) if piece.is_main}
              for module, part in named_modules_of(built.model)}
    held_boxes = _gather_boxes(pieces, grids)
    plan = _plan(grids, held_boxes, provider, family_config, options, out)
    first = dist.get_rank(grids.host) == 0
    with contextlib.ExitStack() as stack:
        writers, problems = _open_writers(plan, grids, out, stack)
        agree(grids, f"{out} cannot be written", problems)
        for module, rules in plan.rules.items():
            if module in grids.modules:
                group = grids.collections[module].intra_dist_opt
                gathered = _whole_tensors(rules, held_boxes[module], pieces[module], group)
                problems += _write(writers.get(module), _converted(gathered, problems), progress)
        if EXTRAS in writers:
            problems += _write(writers[EXTRAS], _base_tensors(plan), progress)
        agree(grids, f"{out} cannot be written", problems)
        for writer in writers.values():
            writer.publish()
    dist.barrier(group=grids.host)
    if first:
        write_index(out, [shard for shards in plan.shards for shard in shards])
        infos = [info for rules in plan.rules.values() for info in infos_of(rules)]
        write_companions(out, plan.base, plan.configuration, infos)
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
          out: Path) -> _Plan:
    """The plan. Collective; raises ValueError on every rank where any rank cannot make it."""
    problems: list[str] = []
    maps = {module: provider.weight_map(family_config, module) for module in grids.layout.grids}
    plan = _Plan({}, [], None, None)
    try:
        check_empty(out)
        if options.base:
            plan.base = HfSource(options.base)
        base = None if plan.base is None else plan.base.path
        plan.configuration = exported_configuration(provider, family_config, base, maps)
    except ValueError as error:
        problems.append(str(error))
    for module, weight_map in maps.items():
        scheme = weight_map.best_scheme(plan.base.tensors) if plan.base else weight_map.schemes[0]
        problems += _uncovered(module, weight_map, held_boxes[module])
        whole = {name: (held[0].shape, held[0].dtype) for name, held in held_boxes[module].items()}
        plan.rules[module], unfit = plan_rules(module, weight_map, scheme, whole, options)
        problems += unfit
    parts = [infos_of(rules) for rules in plan.rules.values()]
    try:
        if plan.base is not None and not problems:
            parts.append(base_extras(plan.base, maps.values(), [info for part in parts for info in part], options))
        plan.shards = plan_shards(parts, options.max_shard_bytes)
    except ValueError as error:
        problems.append(str(error))
    agree(grids, f"the model cannot be exported to {out}", problems)
    return plan


def _open_writers(plan: _Plan, grids: Grids, out: Path,
                  stack: contextlib.ExitStack) -> tuple[dict[str, ShardWriter], list[str]]:
    """This rank's writers by module, and what went wrong."""
    chosen = {module: shards for module, shards in zip(plan.rules, plan.shards, strict=False)
              if module in grids.modules and grids.collections[module].intra_dist_opt.rank() == 0}
    if dist.get_rank(grids.host) == 0 and plan.base is not None:
        chosen[EXTRAS] = plan.shards[-1]
    try:
        return {name: stack.enter_context(ShardWriter(out, shards)) for name, shards in chosen.items()}, []
    except OSError as error:
        return {}, [str(error)]


def _base_tensors(plan: _Plan) -> Iterator[tuple[str, torch.Tensor, int]]:
    assert plan.base is not None
    for shard in plan.shards[-1]:
        for info in shard.tensors:
            yield info.name, plan.base.read(info.name).to(info.dtype), 0


def _uncovered(module: str, weight_map: WeightMap, held_boxes: Mapping[str, Sequence[HeldBox]]) -> Iterator[str]:
    """A line for each tensor that the map and the model do not share, and for each whose pieces leave gaps."""
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
    """Each rule's whole tensor on the CPU of the group's first rank, one at a time; nothing on the others."""
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


def _converted(gathered: Iterator[tuple[PlannedRule, torch.Tensor]],
               problems: list[str]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Convert whole tensors, and note those whose values cannot be written."""
    for rule, whole in gathered:
        found = rule.check(whole)
        problems += found
        if not found:
            yield from rule.convert(whole)


def _write(writer: ShardWriter | None, tensors: Iterator[tuple[str, torch.Tensor, int]],
           progress: Progress | None) -> list[str]:
    """Write rows as they come; returns what went wrong. The rest is still taken in: other ranks are sending it.

    A rank without a writer has no tensors and only sends.
    """
    total = sum(len(shard.tensors) for shard in writer.shards) if writer else 0
    count = 0
    problems: list[str] = []
    for name, tensor, first_row in tensors:
        if problems:
            continue
        assert writer is not None
        is_whole = False
        try:
            is_whole = writer.write(name, tensor, first_row)
            count += is_whole
            if count == total:
                writer.finish()
        except OSError as error:
            problems.append(str(error))
        if progress and is_whole:
            progress(count, total, name)
    return problems
