"""A small mixture of experts, sharded like Megatron's ranks and vLLM's workers do, by slicing numpy arrays.

Independent of what it tests: every element of every Hugging Face tensor has a number (`SmallModel.whole`). The
functions cut, fuse, pad and stack arrays of these numbers as Megatron-core 0.19 and vLLM 0.32 do; `slices_of`
reads off the result which boxes of which tensors came to lie where. A transfer is right when each worker's tensors hold
the numbers that its own slicing puts there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from mimo.boxes import Box
from mimo.refit.plan import Op
from mimo.refit.tensor_slices import Address, Holder, Holders, RecvSpec, TensorMeta, TensorSlice
from scripts.bench.refit_shapes import EngineLayout, TrainerLayout

Array = np.ndarray
Tensors = dict[str, Array]
Found = tuple[str, Box, int, tuple[int, ...]]
# Of padding: no element of any tensor.
PADDING = -1


@dataclass(frozen=True)
class SmallModel:
    """Sizes of a mixture of experts; `prefix` is that of its Hugging Face names."""

    layers: int = 2
    hidden: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 4
    inner: int = 16
    experts: int = 4
    vocabulary: int = 21
    gated: bool = True
    shared_expert: bool = True
    tied: bool = False
    prefix: str = "model"

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, in the order of the chunk plan."""
        hidden, halves = self.hidden, ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        shapes: dict[str, tuple[int, ...]] = {f"{self.prefix}.embed_tokens.weight": (self.vocabulary, hidden)}
        for layer in range(self.layers):
            at = f"{self.prefix}.layers.{layer}"
            shapes[f"{at}.input_layernorm.weight"] = (hidden,)
            for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                shapes[f"{at}.self_attn.{part}_proj.weight"] = (heads * self.head_dim, hidden)
                shapes[f"{at}.self_attn.{part}_proj.bias"] = (heads * self.head_dim,)
            shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, self.heads * self.head_dim)
            shapes[f"{at}.mlp.gate.weight"] = (self.experts, hidden)
            shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (self.experts,)
            mlps = [f"{at}.mlp.experts.{expert}" for expert in range(self.experts)]
            mlps += [f"{at}.mlp.shared_expert"] if self.shared_expert else []
            for mlp in mlps:
                shapes |= {f"{mlp}.{half}.weight": (self.inner, hidden) for half in halves}
                shapes[f"{mlp}.down_proj.weight"] = (hidden, self.inner)
        shapes[f"{self.prefix}.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, hidden)
        return shapes

    @cached_property
    def entries(self) -> list[TensorMeta]:
        """The chunk plan; routing stays float32, all else is bfloat16."""
        return [TensorMeta(name, "float32" if ".mlp.gate." in name else "bfloat16", shape, ".mlp.gate." in name)
                for name, shape in self.shapes.items()]

    @cached_property
    def firsts(self) -> dict[str, int]:
        """The number of each tensor's first element; the others follow, row by row."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        return {name: sum(sizes[:number]) for number, name in enumerate(self.shapes)}

    @cached_property
    def whole(self) -> Tensors:
        """Tensors that hold the numbers of their elements, which no two share."""
        return {name: np.arange(self.firsts[name], self.firsts[name] + math.prod(shape)).reshape(shape)
                for name, shape in self.shapes.items()}

    @cached_property
    def element_bytes(self) -> Array:
        """Bytes on the wire of each element, by its number."""
        return np.repeat([4 if entry.dtype == "float32" else 2 for entry in self.entries],
                         [math.prod(entry.shape) for entry in self.entries])

    def mlp_halves(self, mlp: str) -> list[Array]:
        """Gate and up, or up alone."""
        halves = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        return [self.whole[f"{mlp}.{half}.weight"] for half in halves]

    def stage_layers(self, stages: int, stage: int) -> range:
        """Layers of a pipeline stage, uneven where they must be."""
        return range(self.layers * stage // stages, self.layers * (stage + 1) // stages)


def trainer_shards(model: SmallModel, layout: TrainerLayout, rank: int) -> Tensors:
    """Return a rank's parameters. Orders are Megatron's `tp-cp-ep-dp-pp`, with `etp` for `tp` where experts are."""
    stage, dense = divmod(rank, layout.tp * layout.dp)
    tp, etp, ep = dense % layout.tp, dense % layout.etp, dense // layout.etp % layout.ep
    whole, prefix = model.whole, model.prefix
    found = {}
    if stage == 0 or (model.tied and stage == layout.pp - 1):
        found["embedding"] = part(padded(whole[f"{prefix}.embed_tokens.weight"], 4 * layout.tp), layout.tp, tp)
    for layer in model.stage_layers(layout.pp, stage):
        at, local = f"{prefix}.layers.{layer}", layer - model.stage_layers(layout.pp, stage).start
        name = f"decoder.layers.{local}"
        found[f"{name}.norm"] = whole[f"{at}.input_layernorm.weight"]
        for kind in ("weight", "bias"):
            found[f"{name}.linear_qkv.{kind}"] = part(interleaved(
                [whole[f"{at}.self_attn.{which}_proj.{kind}"] for which in "qkv"], model.kv_heads), layout.tp, tp)
        found[f"{name}.linear_proj"] = part(whole[f"{at}.self_attn.o_proj.weight"], layout.tp, tp, 1)
        found[f"{name}.router"] = whole[f"{at}.mlp.gate.weight"]
        found[f"{name}.expert_bias"] = whole[f"{at}.mlp.gate.e_score_correction_bias"]
        for number, expert in enumerate(share(model.experts, layout.ep, ep)):
            found |= _trainer_mlp(model, f"{at}.mlp.experts.{expert}", f"{name}.experts.{number}", layout.etp, etp)
        if model.shared_expert:
            found |= _trainer_mlp(model, f"{at}.mlp.shared_expert", f"{name}.shared_expert", layout.tp, tp)
    if stage == layout.pp - 1:
        found["final_norm"] = whole[f"{prefix}.norm.weight"]
        if not model.tied:
            found["output_layer"] = part(padded(whole["lm_head.weight"], 4 * layout.tp), layout.tp, tp)
    return found


def _trainer_mlp(model: SmallModel, mlp: str, name: str, ways: int, place: int) -> Tensors:
    halves = [part(half, ways, place) for half in model.mlp_halves(mlp)]
    return {f"{name}.linear_fc1": np.concatenate(halves),
            f"{name}.linear_fc2": part(model.whole[f"{mlp}.down_proj.weight"], ways, place, 1)}


def engine_shards(model: SmallModel, layout: EngineLayout, worker: int) -> Tensors:
    """Return a worker's parameters as vLLM's loaders fill them; padding rows of the vocabulary are `PADDING`."""
    rest, tp = divmod(worker, layout.tp)
    rest, stage = divmod(rest, layout.pp)
    moe = (rest % layout.dp) * layout.tp + tp  # experts are divided over data parallel workers, too
    whole, prefix = model.whole, model.prefix
    found = {}
    if stage == 0 or (model.tied and stage == layout.pp - 1):
        found["embed_tokens"] = part(padded(whole[f"{prefix}.embed_tokens.weight"], 8 * layout.tp), layout.tp, tp)
    for layer in model.stage_layers(layout.pp, stage):
        name = f"{prefix}.layers.{layer}"
        found[f"{name}.input_layernorm"] = whole[f"{name}.input_layernorm.weight"]
        kv_ways = min(layout.tp, model.kv_heads)  # a head has several workers where there are fewer heads than those
        for kind in ("weight", "bias"):
            query, key, value = (whole[f"{name}.self_attn.{which}_proj.{kind}"] for which in "qkv")
            found[f"{name}.qkv_proj.{kind}"] = np.concatenate([
                part(query, layout.tp, tp), *(part(each, kv_ways, tp * kv_ways // layout.tp) for each in (key, value))])
        found[f"{name}.o_proj"] = part(whole[f"{name}.self_attn.o_proj.weight"], layout.tp, tp, 1)
        found[f"{name}.gate"] = whole[f"{name}.mlp.gate.weight"]
        found[f"{name}.e_score_correction_bias"] = whole[f"{name}.mlp.gate.e_score_correction_bias"]
        ways, place = (1, 0) if layout.ep else (layout.dp * layout.tp, moe)
        experts = share(model.experts, layout.dp * layout.tp, moe) if layout.ep else range(model.experts)
        mlps = [_engine_mlp(model, f"{name}.mlp.experts.{expert}", ways, place) for expert in experts]
        if mlps:
            found[f"{name}.w13_weight"] = np.stack([first for first, _ in mlps])
            found[f"{name}.w2_weight"] = np.stack([second for _, second in mlps])
        if model.shared_expert:
            found[f"{name}.gate_up_proj"], found[f"{name}.down_proj"] = _engine_mlp(
                model, f"{name}.mlp.shared_expert", layout.tp, tp)
    if stage == layout.pp - 1:
        found["norm"] = whole[f"{prefix}.norm.weight"]
        if not model.tied:
            found["lm_head"] = part(padded(whole["lm_head.weight"], 8 * layout.tp), layout.tp, tp)
    return found


def _engine_mlp(model: SmallModel, mlp: str, ways: int, place: int) -> tuple[Array, Array]:
    return (np.concatenate([part(half, ways, place) for half in model.mlp_halves(mlp)]),
            part(model.whole[f"{mlp}.down_proj.weight"], ways, place, 1))


def part(tensor: Array, ways: int, place: int, axis: int = 0) -> Array:
    """Return one of several equal parts of a tensor."""
    size, rest = divmod(tensor.shape[axis], ways)
    assert not rest, f"{tensor.shape} does not divide by {ways} on axis {axis}"
    picked = slice(place * size, (place + 1) * size)
    return np.ascontiguousarray(tensor[picked] if axis == 0 else tensor[:, picked])


def padded(tensor: Array, multiple: int) -> Array:
    """Return a vocabulary with rows of padding after its own."""
    rows = -len(tensor) % multiple
    return np.pad(tensor, ((0, rows), (0, 0)), constant_values=PADDING)


def interleaved(parts: Sequence[Array], groups: int) -> Array:
    """Megatron's linear_qkv: queries, key and value of the first group, those of the second, and so on."""
    return np.concatenate([part(each, groups, group) for group in range(groups) for each in parts])


def share(count: int, ways: int, place: int) -> range:
    """Experts of one of several ranks: consecutive, the first ranks have one more where it does not come out even."""
    each, more = divmod(count, ways)
    first = place * each + min(place, more)
    return range(first, first + each + (place < more))


def slices_of(model: SmallModel, tensors: Tensors) -> list[TensorSlice]:
    """Find which boxes of which Hugging Face tensors lie where, from the numbers of their elements."""
    return [TensorSlice(source, box, Address(name, offset, strides)) for name, tensor in tensors.items()
            for source, box, offset, strides in _found_in(model, tensor.shape, tensor.tobytes())]


@cache
def _found_in(model: SmallModel, shape: tuple[int, ...], numbers: bytes) -> list[Found]:
    """Names, boxes, offsets and strides: rows of the last axis that follow each other in one tensor are one box."""
    width = shape[-1] if len(shape) > 1 else 1
    names, firsts = list(model.firsts), list(model.firsts.values())
    found: list[Found] = []
    above = ("", (), -1)  # what one more row of the box above would be: name, columns, number of the row
    for number, row in enumerate(np.frombuffer(numbers, np.int64).reshape(-1, width)):
        if row[0] == PADDING:
            above = ("", (), -1)
            continue
        assert (np.diff(row) == 1).all(), f"row {number} of {shape} is not consecutive"
        source = names[bisect_right(firsts, row[0]) - 1]
        index, *first = (int(each) for each in np.unravel_index(row[0] - model.firsts[source], model.shapes[source]))
        columns = tuple((each, each + width) for each in first)
        if above == (source, columns, index):
            _, box, offset, strides = found.pop()
            found.append((source, Box(box.starts, (index + 1, *box.stops[1:])), offset, strides))
        else:
            found.append((source, Box((index, *(start for start, _ in columns)),
                                      (index + 1, *(stop for _, stop in columns))),
                          number * width, (width, 1)[-1 - len(columns):]))
        above = (source, columns, index + 1)
    return found


def holders_of(slices: Sequence[Iterable[TensorSlice]]) -> Holders:
    """Return the boxes with the ranks that hold them, from each rank's slices."""
    found: dict[str, dict[Box, list[int]]] = {}
    for rank, own in enumerate(slices):
        for name, box in dict.fromkeys((part.name, part.box) for part in own):
            found.setdefault(name, {}).setdefault(box, []).append(rank)
    return {name: [Holder(box, tuple(ranks)) for box, ranks in boxes.items()] for name, boxes in found.items()}


def recv_spec_of(model: SmallModel, slices: Sequence[TensorSlice], through_loader: Callable[[str], bool]) -> RecvSpec:
    """Return what a worker receives; the names chosen go whole through its loader."""
    order = {name: number for number, name in enumerate(model.shapes)}
    direct = [part for part in slices if not through_loader(part.name)]
    loader = {part.name for part in slices if through_loader(part.name)}
    return RecvSpec(tuple(sorted(direct, key=lambda part: order[part.name])),
                    tuple(sorted(loader, key=order.__getitem__)))


def taken(tensors: Tensors, address: Address, box: Box) -> Array:
    """Return a box's elements in a rank's or worker's own tensor, as a view."""
    tensor = tensors[address.tensor]
    return np.ndarray(box.sizes, tensor.dtype, tensor, address.offset * tensor.itemsize,
                      [stride * tensor.itemsize for stride in address.strides])


def packed(operations: Iterable[Op], tensors: Tensors) -> Array:
    """Pack the boxes of one message in order."""
    return np.concatenate([taken(tensors, each.source, each.box).reshape(-1) for each in operations])


def unpacked(operations: Iterable[Op], message: Array, tensors: Tensors) -> int:
    """Write a message's boxes to where they belong; the number of elements written."""
    first = 0
    for each in operations:
        taken(tensors, each.target, each.box)[...] = message[first:first + each.box.numel].reshape(each.box.sizes)
        first += each.box.numel
    return first
