"""Slices of global tensors that a checkpoint holds of this rank's modules and of their optimizer state.

Megatron Core's `sharded_state_dict` says which slice of which global tensor every parameter and saved buffer is. Keys
consist of the module's name and Megatron Core's key inside the unwrapped module. Therefore they do not depend on the
layout, or on whether the module trains and has a DDP wrapper.

Every layout can load the optimizer state that any layout has saved. Megatron Core's formats either follow its gradient
buckets, and can then only be loaded with another data-parallel size, or gather a whole optimizer over its data-parallel
ranks first. Here each rank saves the flat ranges that it owns as boxes of the global tensors, without communication,
and loads the parts that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import unwrap_model

from mimo.boxes import flat_range_boxes
from mimo.compat import parameter_ranges
from mimo.grid.groups import Grids
from mimo.model.build import named_modules_of
from mimo.model.mimo_model import HeteroModel
from mimo.training.optimizer import HeteroOptimizer

PROJECTOR = "projector"
MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"
REMAINDER = "master_param"
"""The 16 bits of each float32 weight that its bfloat16 weight lacks, as the precision-aware optimizer names them."""


@dataclass
class Saved:
    """A parameter or buffer of this rank and the global slices that it consists of.

    Attributes:
        module: the module it belongs to.
        name: its dotted name inside the module on this rank, for messages.
        tensor: the parameter or buffer itself.
        pieces: contiguous views of `tensor`, in its order, with their places in global tensors; several where Megatron
            Core splits it (gate and up halves).
        is_expert: whether it is replicated over the expert data-parallel group instead of the dense one.
    """

    module: str
    name: str
    tensor: torch.Tensor
    pieces: list[ShardedTensor]
    is_expert: bool

    @property
    def part(self) -> str:
        """Name of its part in --freeze: the module's name, or `projector`."""
        return PROJECTOR if "input_projections." in self.name else self.module


def sharded_tensors(module: torch.nn.Module, prefix: str, groups: ProcessGroupCollection
                    ) -> Iterator[tuple[ShardedTensor | ShardedTensorFactory, list[ShardedTensor]]]:
    """Yield Megatron Core's entry and pieces of every parameter and persistent buffer of a rank's part of a module.

    Gate and up halves are separate pieces. Their data are views, so that copying into them changes the model.
    """
    state = sharded_state_dict_default(unwrap_model(module), prefix, (), {"dp_cp_group": groups.dp_cp})
    for entry in nested_values(state):
        # Extra state holds the scaling history of fp8 layers and nothing else.
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and entry.data is not None:
            detached = replace(entry, data=entry.data.detach())
            yield entry, [detached] if isinstance(detached, ShardedTensor) else list(nested_values(detached.build()))


def saved_tensors(model: HeteroModel, grids: Grids) -> list[Saved]:
    """Return every parameter and persistent buffer of this rank, modules in the model's order."""
    found = []
    for name, part in named_modules_of(model):
        experts = {id(parameter) for parameter in part.parameters() if not vars(parameter).get("allreduce", True)}
        for entry, pieces in sharded_tensors(part, f"{name}.", grids.collections[name]):
            for piece in pieces:
                assert isinstance(piece, ShardedTensor), piece
                # A factory has to split by views. Values that are loaded into copies would be lost.
                assert isinstance(entry, ShardedTensor) or (
                    piece.data.is_contiguous()
                    and piece.data.untyped_storage().data_ptr() == entry.data.untyped_storage().data_ptr()
                ), f"{entry.key} is not split into contiguous views"
            found.append(Saved(name, entry.key.removeprefix(f"{name}."), entry.data, pieces, id(entry.data) in experts))
    return found


def flat_range(
    saved: Saved, begin: int, end: int, values: torch.Tensor, key: str, *, owned: bool
) -> list[ShardedTensor]:
    """Return a flat range of a parameter, such as a distributed optimizer owns, as slices of global tensors.

    Args:
        saved: the parameter.
        begin: first element of the range, in row-major order.
        end: one past its last element.
        values: one value for each element, contiguous. The slices are views of it.
        key: replaces the module's name in the keys.
        owned: whether no other data-parallel rank has these elements.
    """
    flat, found = values.view(-1), []
    assert flat.numel() == end - begin, (saved.name, flat.numel(), begin, end)
    start = saved.tensor.storage_offset()
    for piece in saved.pieces:
        origin = piece.data.storage_offset() - start
        low, high = max(begin, origin), min(end, origin + piece.data.numel())
        ones = (1,) * piece.prepend_axis_num
        at = low - begin  # start of the box's values in `flat`
        for box in flat_range_boxes(piece.data.shape, low - origin, high - origin):
            place = (*(0,) * piece.prepend_axis_num, *box.starts)
            found.append(ShardedTensor(
                key=f"{key}.{piece.key.removeprefix(f'{saved.module}.')}",
                data=flat[at: at + box.numel].view(*ones, *box.sizes),
                dtype=values.dtype, local_shape=(*ones, *box.sizes), global_shape=piece.global_shape,
                global_offset=tuple(base + more for base, more in zip(piece.global_offset, place, strict=True)),
                axis_fragmentations=None, allow_shape_mismatch=piece.allow_shape_mismatch,
                replica_id=(*piece.replica_id[:-1], 0) if owned else piece.replica_id,
            ))
            at += box.numel
    return found


def spread_replicas(saved: Iterable[Saved], grids: Grids) -> list[ShardedTensor]:
    """Choose one writer for each piece among its data-parallel replicas, so that all ranks write about equally much.

    Returns:
        The pieces. The last number of the replica id is 0 on the writer.
    """
    pieces = []
    for piece, group, writer in _with_writers(saved, grids):
        place = (group.rank() - writer) % group.size()
        pieces.append(replace(piece, replica_id=(*piece.replica_id[:-1], place)))
    return pieces


@torch.no_grad()
def broadcast_from_writers(saved: Iterable[Saved], grids: Grids) -> None:
    """Send each piece from the replica that `spread_replicas` chose to the others. Collective over each module."""
    for piece, group, writer in _with_writers(saved, grids):
        if group.size() > 1:
            # Every backend can send bytes.
            dist.broadcast(piece.data.view(-1).view(torch.uint8), src=dist.get_global_rank(group, writer), group=group)


def _with_writers(
    saved: Iterable[Saved], grids: Grids
) -> Iterator[tuple[ShardedTensor, dist.ProcessGroup, int]]:
    """Yield each piece with the group of its replicas and the rank of its writer in the group.

    The writer is the replica that has the fewest bytes so far. All replicas have the same pieces in the same order, so
    they make the same choice without a message.
    """
    loads: dict[tuple[str, bool], list[int]] = {}
    for tensor in saved:
        groups = grids.collections[tensor.module]
        group = groups.expt_dp if tensor.is_expert else groups.dp_cp
        load = loads.setdefault((tensor.module, tensor.is_expert), [0] * group.size())
        for piece in tensor.pieces:
            assert isinstance(piece.replica_id, tuple) and piece.replica_id[-1] == group.rank(), piece
            writer = load.index(min(load))
            load[writer] += piece.data.numel() * piece.data.element_size()
            yield piece, group, writer

@dataclass
class Optimized:
    """Optimizer state of one parameter on this rank.

    Attributes:
        saved: the parameter.
        main: values that the optimizer updates: an fp32 copy of elements `begin` to `end`, or the parameter's own
            memory.
        begin, end: range of the parameter's elements, in row-major order.
        inner: the torch (or Transformer Engine) optimizer.
        group: the optimizer's parameter group.
        owned: whether no other data-parallel rank has these elements.
    """

    saved: Saved
    main: torch.Tensor
    begin: int
    end: int
    inner: Any
    group: dict[str, Any]
    owned: bool

    @property
    def weights(self) -> torch.Tensor:
        """Values of these elements in the model, flat."""
        return self.saved.tensor.detach().reshape(-1)[self.begin: self.end]

    @property
    def has_main(self) -> bool:
        """Whether `main` is a copy of the parameter."""
        return self.main.data_ptr() != self.weights.data_ptr()

    def step(self) -> int:
        """Return the number of updates that Adam has counted."""
        return int(self.inner.state.get(self.main, {}).get("step", self.group.get("step", 0)))

    def set_step(self, step: int) -> None:
        """Set the number of updates. torch's optimizers keep it in the state, fused ones in the group."""
        if isinstance(self.inner, torch.optim.Adam | torch.optim.AdamW):
            self.inner.state[self.main]["step"] = torch.tensor(float(step))
        else:
            self.group["step"] = step

    def values(self) -> dict[str, torch.Tensor]:
        """Return the moments and the fp32 copy, or what is stored instead of it, by kind."""
        state = self.inner.state[self.main]
        values = {kind: state[kind] for kind in (*MOMENTS, REMAINDER) if kind in state}
        if self.has_main:
            values[MAIN] = self.main
        return values

    def entries(self) -> list[ShardedTensor]:
        """Return entries for `values`, as views."""
        found = []
        for kind, value in self.values().items():
            key = f"mimo.{self.saved.module}.optimizer.state.{kind}"
            found += flat_range(self.saved, self.begin, self.end, value.detach(), key, owned=self.owned)
        return found


def optimized(optimizer: HeteroOptimizer, saved: Iterable[Saved]) -> list[Optimized]:
    """Return the state that this rank's optimizers hold. Where there was none yet, moments are zero."""
    by_parameter = {id(tensor.tensor): tensor for tensor in saved}
    found = []
    for one in optimizer.inner_optimizers():
        _allocate(one)
        for parameter, main, begin, end, group, owned in _held(one):
            assert id(parameter) in by_parameter, (
                f"a parameter of shape {tuple(parameter.shape)} is optimized but not saved")
            if begin < end:
                found.append(Optimized(by_parameter[id(parameter)], main, begin, end, one.optimizer, group, owned))
    return found


def _allocate(optimizer: Any) -> None:
    """Allocate the state of every parameter. torch's Adam would do so only in its first step."""
    if optimizer.config.use_precision_aware_optimizer:
        # Megatron Core's function calls this method without its second argument.
        adam = optimizer.optimizer
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.initialize_state(parameter, parameter.dtype == torch.bfloat16)
    elif optimizer.init_state_fn is not None:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    if isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW):
        for state in optimizer.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))


def _held(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int, dict[str, Any], bool]]:
    """Yield (model parameter, main values, begin, end, group, owned) of an optimizer of Megatron Core."""
    groups = optimizer.optimizer.param_groups
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            span, _ = parameter_ranges(optimizer, parameter)
            yield parameter, groups[group]["params"][order], span.start, span.end, groups[group], True
        return
    owner = {id(parameter): group for group in groups for parameter in group["params"]}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [
            pair
            for model, main in ((optimizer.float16_groups, optimizer.fp32_from_float16_groups),
                                (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups))
            for models, mains in zip(model, main, strict=True)
            for pair in zip(models, mains, strict=True)
        ]
    else:
        assert isinstance(optimizer, FP32Optimizer), type(optimizer)
        pairs = [(parameter, parameter) for group in groups for parameter in group["params"]]
    for parameter, main in pairs:
        yield parameter, main, 0, parameter.numel(), owner[id(main)], False


def steps_of(held: Iterable[Optimized]) -> dict[str, dict[str, int]]:
    """Return Adam's number of updates of each part of each module on this rank. It is the same within a part."""
    steps: dict[str, dict[str, int]] = {}
    for one in held:
        part, step = one.saved.part, one.step()
        known = steps.setdefault(one.saved.module, {}).setdefault(part, step)
        assert known == step, f"{one.saved.name} of {one.saved.module} counts {step} updates, others of {part} {known}"
    return steps


@torch.no_grad()
def take_weights(held: Iterable[Optimized]) -> None:
    """Set the fp32 copies to the model's weights."""
    for one in held:
        if one.has_main:
            one.main.view(-1).copy_(one.weights)
        elif REMAINDER in one.values():
            one.values()[REMAINDER].zero_()


@torch.no_grad()
def differing(held: Iterable[Optimized]) -> list[str]:
    """Return the parameters whose weights are not their rounded fp32 copies, as `module: name`.

    A step with learning rate 0 would change them.
    """
    return [
        f"{one.saved.module}: {one.saved.name}" for one in held
        if one.has_main and not torch.equal(one.main.view(-1).to(one.weights.dtype), one.weights)
    ]
