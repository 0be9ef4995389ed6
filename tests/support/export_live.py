"""Write the modules of a running trainer as a Hugging Face folder, to compare with; inside worker processes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mimo.boxes import Box, is_partition
from mimo.comm import gather
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel, named_modules_of
from mimo.protocols import ModelProvider
from mimo.weights.export import ExportOptions, plan_export
from mimo.weights.match import module_pieces


@torch.no_grad()
def export_model(built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any, out_dir: str | Path,
                 options: ExportOptions | None = None) -> None:
    """Gather all pieces of small modules on the first rank, which writes them. Collective over the world."""
    built.finish_gathers("an export")
    mine = [(module, piece.name, piece.box, piece.shape, piece.tensor.cpu().clone())
            for module, part in named_modules_of(built.model)
            for piece in module_pieces(part, grids.collections[module])]
    gathered = list(itertools.chain(*gather(grids, mine)))
    if dist.get_rank(grids.host) == 0:
        wholes: dict[str, dict[str, torch.Tensor]] = {module: {} for module in grids.layout.grids}
        boxes: dict[tuple[str, str], set[Box]] = {}
        for module, name, box, shape, tensor in gathered:
            whole = wholes[module].setdefault(name, torch.empty(shape, dtype=tensor.dtype))
            held = boxes.setdefault((module, name), set())
            # Several ranks hold copies, whose bytes are equal.
            assert box not in held or torch.equal(whole[box.slices], tensor), (module, name, box)
            whole[box.slices] = tensor
            held.add(box)
        for (module, name), held in boxes.items():
            assert is_partition(Box.whole(wholes[module][name].shape), list(held)), (module, name)
        _write(wholes, provider, family_config, Path(out_dir), options or ExportOptions())
    dist.barrier(group=grids.host)


def _write(wholes: dict[str, dict[str, torch.Tensor]], provider: ModelProvider, family_config: Any, out: Path,
           options: ExportOptions) -> None:
    maps = {module: provider.weight_map(family_config, module) for module in wholes}
    for module, tensors in wholes.items():
        assert {rule.megatron for rule in maps[module].rules} == tensors.keys(), module
    shapes = {module: {name: (whole.shape, whole.dtype) for name, whole in tensors.items()}
              for module, tensors in wholes.items()}
    plan = plan_export(maps, options, out, provider, family_config, shapes, [], "the trainer")
    plan.write(out, "the trainer", lambda module, rule: wholes[module][rule.megatron])
