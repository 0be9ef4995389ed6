"""Large mixtures of experts as shapes: what the ranks of a trainer hold of them, and what workers of an engine need.

No tensor is made. The models are the published ones without multi-token prediction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from mimo.boxes import Box, contiguous_strides
from mimo.refit.tensor_slices import Address, Holder, Holders, RecvSpec, TensorMeta, TensorSlice


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model.

    Attributes:
        name: its name in Hugging Face's checkpoint.
        shape: shape of the whole tensor.
        layer: number of its layer; -1 before the first layer, the number of layers after the last.
        fused: the engine's tensor into which it is stacked.
        axis: the axis that tensor parallelism divides, or None.
        expert: number of its expert, or None.
        part: q, k or v of grouped-query attention, else empty.
        sections: rows of parts that tensor parallelism divides one by one, such as Mamba's z, x, B, C and dt; empty
            for a tensor of one part.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    fused: str
    axis: int | None = None
    expert: int | None = None
    part: str = ""
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Model:
    """Tensors in the order of the chunk plan."""

    tensors: tuple[Tensor, ...]
    layers: int
    experts: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def entries(self) -> list[TensorMeta]:
        """Entries of the chunk plan. Biases of the router stay float32."""
        return [TensorMeta(each.name, "float32" if each.name.endswith("_bias") else "bfloat16", each.shape,
                           each.name.endswith("_bias")) for each in self.tensors]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each tensor in the chunk plan."""
        return {each.name: number for number, each in enumerate(self.tensors)}


@cache
def by_stage(model: Model, stages: int) -> dict[tuple[int, int | None], list[Tensor]]:
    """Group tensors by pipeline stage and expert. Stages differ by at most one layer."""
    ends = [model.layers * (stage + 1) // stages for stage in range(stages)]
    found: dict[tuple[int, int | None], list[Tensor]] = {}
    for tensor in model.tensors:
        stage = bisect_right(ends, min(max(tensor.layer, 0), model.layers - 1))
        found.setdefault((stage, tensor.expert), []).append(tensor)
    return found


def mlp(at: str, layer: int, hidden: int, inner: int, expert: int | None = None) -> list[Tensor]:
    """Return gate, up and down projection of a layer or of one of its experts."""
    fused = at if expert is None else at.rpartition(".")[0]
    return [Tensor(f"{at}.gate_proj.weight", (inner, hidden), layer, f"{fused}.w13", 0, expert),
            Tensor(f"{at}.up_proj.weight", (inner, hidden), layer, f"{fused}.w13", 0, expert),
            Tensor(f"{at}.down_proj.weight", (hidden, inner), layer, f"{fused}.w2", 1, expert)]


def alone(name: str, shape: tuple[int, ...], layer: int, axis: int | None = None) -> Tensor:
    """Return a tensor that is not fused."""
    return Tensor(name, shape, layer, name, axis)


def around(layers: Iterable[Tensor], count: int, vocabulary: int, hidden: int) -> tuple[Tensor, ...]:
    """Put the embeddings before the layers, and the output layer after them."""
    return (alone("model.embed_tokens.weight", (vocabulary, hidden), -1, 0), *layers,
            alone("model.norm.weight", (hidden,), count), alone("lm_head.weight", (vocabulary, hidden), count, 0))


def qwen3_235b_a22b() -> Model:
    """Qwen3-235B-A22B: 94 layers of 128 experts, 64 heads with 4 of keys and values."""
    hidden, tensors = 4096, []
    for layer in range(94):
        at = f"model.layers.{layer}"
        tensors += [alone(f"{at}.{norm}_layernorm.weight", (hidden,), layer) for norm in ("input", "post_attention")]
        tensors += [Tensor(f"{at}.self_attn.{part}_proj.weight", (heads * 128, hidden), layer, f"{at}.qkv_proj", 0,
                           None, part) for part, heads in (("q", 64), ("k", 4), ("v", 4))]
        tensors += [alone(f"{at}.self_attn.{part}_norm.weight", (128,), layer) for part in "qk"]
        tensors += [alone(f"{at}.self_attn.o_proj.weight", (hidden, 64 * 128), layer, 1),
                    alone(f"{at}.mlp.gate.weight", (128, hidden), layer)]
        tensors += [each for expert in range(128)
                    for each in mlp(f"{at}.mlp.experts.{expert}", layer, hidden, 1536, expert)]
    return Model(around(tensors, 94, 151936, hidden), 94, 128, 64, 4, 128)


def deepseek_v3() -> Model:
    """DeepSeek-V3: 3 dense layers, 58 layers of 256 experts and a shared one, latent attention."""
    hidden, tensors = 7168, []
    for layer in range(61):
        at = f"model.layers.{layer}"
        tensors += [alone(f"{at}.{norm}_layernorm.weight", (hidden,), layer) for norm in ("input", "post_attention")]
        tensors += [Tensor(f"{at}.self_attn.{name}.weight", (rows, hidden), layer, f"{at}.fused_qkv_a_proj")
                    for name, rows in (("q_a_proj", 1536), ("kv_a_proj_with_mqa", 576))]
        tensors += [alone(f"{at}.self_attn.{name}_a_layernorm.weight", (size,), layer)
                    for name, size in (("q", 1536), ("kv", 512))]
        tensors += [alone(f"{at}.self_attn.q_b_proj.weight", (128 * 192, 1536), layer, 0),
                    alone(f"{at}.self_attn.kv_b_proj.weight", (128 * 256, 512), layer, 0),
                    alone(f"{at}.self_attn.o_proj.weight", (hidden, 128 * 128), layer, 1)]
        if layer < 3:
            tensors += mlp(f"{at}.mlp", layer, hidden, 18432)
            continue
        tensors += [alone(f"{at}.mlp.gate.weight", (256, hidden), layer),
                    alone(f"{at}.mlp.gate.e_score_correction_bias", (256,), layer)]
        tensors += [each for expert in range(256)
                    for each in mlp(f"{at}.mlp.experts.{expert}", layer, hidden, 2048, expert)]
        tensors += mlp(f"{at}.mlp.shared_experts", layer, hidden, 2048)
    return Model(around(tensors, 61, 129280, hidden), 61, 256)


def nemotron_ultra_550b() -> Model:
    """A hybrid like Nemotron Ultra, of 550 B: 48 layers of Mamba, 12 of attention, 48 of 512 experts.

    Each layer has its mixer and no MLP. Experts work in a latent space of 2,048, and have no gate.
    """
    hidden, latent, inner, experts, tensors = 8192, 2048, 5376, 512, []
    mamba, groups, heads = 16384, 8 * 128, 256
    for layer in range(108):
        at = f"backbone.layers.{layer}"
        mixer = f"{at}.mixer"
        tensors.append(alone(f"{at}.norm.weight", (hidden,), layer))
        if layer % 9 == 4:
            tensors += [Tensor(f"{mixer}.{part}_proj.weight", (count * 128, hidden), layer, f"{mixer}.qkv_proj", 0,
                               None, part) for part, count in (("q", 64), ("k", 8), ("v", 8))]
            tensors.append(alone(f"{mixer}.o_proj.weight", (hidden, 64 * 128), layer, 1))
        elif layer % 9 % 2 == 0:
            sections = (mamba, mamba, groups, groups, heads)
            tensors += [Tensor(f"{mixer}.in_proj.weight", (sum(sections), hidden), layer, f"{mixer}.in_proj", 0,
                               sections=sections)]
            convolved = sections[1:4]
            tensors += [Tensor(f"{mixer}.conv1d.{kind}", (sum(convolved), *more), layer, f"{mixer}.conv1d.{kind}", 0,
                               sections=convolved) for kind, more in (("weight", (1, 4)), ("bias", ()))]
            tensors += [alone(f"{mixer}.{name}", (heads,), layer, 0) for name in ("A_log", "D", "dt_bias")]
            tensors += [alone(f"{mixer}.norm.weight", (mamba,), layer, 0),
                        alone(f"{mixer}.out_proj.weight", (hidden, mamba), layer, 1)]
        else:
            tensors += [alone(f"{mixer}.gate.weight", (experts, hidden), layer),
                        alone(f"{mixer}.gate.e_score_correction_bias", (experts,), layer),
                        alone(f"{mixer}.fc1_latent_proj.weight", (latent, hidden), layer),
                        alone(f"{mixer}.fc2_latent_proj.weight", (hidden, latent), layer)]
            for expert in range(experts):
                name, fused = f"{mixer}.experts.{expert}", f"{mixer}.experts"
                tensors += [Tensor(f"{name}.up_proj.weight", (inner, latent), layer, f"{fused}.w13", 0, expert),
                            Tensor(f"{name}.down_proj.weight", (latent, inner), layer, f"{fused}.w2", 1, expert)]
            tensors += [alone(f"{mixer}.shared_experts.up_proj.weight", (2 * inner, hidden), layer, 0),
                        alone(f"{mixer}.shared_experts.down_proj.weight", (hidden, 2 * inner), layer, 1)]
    return Model(around(tensors, 108, 131072, hidden), 108, experts, 64, 8, 128)


MODELS: dict[str, Callable[[], Model]] = {"qwen3-235b-a22b": qwen3_235b_a22b, "deepseek-v3": deepseek_v3,
                                          "nemotron-ultra-550b": nemotron_ultra_550b}


@dataclass(frozen=True)
class TrainerLayout:
    """A Megatron grid: `tp * dp * pp` ranks, which experts divide as `etp * ep * expert_dp * pp`."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class EngineLayout:
    """vLLM: `replicas` independent engines of `dp * pp * tp` workers. With `ep` above 0 a worker has whole experts."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 0
    replicas: int = 1

    @property
    def workers(self) -> int:
        return self.replicas * self.dp * self.pp * self.tp


# Trainer and engines of 512 ranks each, and those of a replica of 550 B over four nodes.
CASES = {
    "qwen3-235b-a22b": (TrainerLayout(8, 8, 8, 32),
                        (EngineLayout(tp=8, replicas=64), EngineLayout(tp=4, dp=8, ep=1, replicas=16))),
    "deepseek-v3": (TrainerLayout(8, 8, 8, 32),
                    (EngineLayout(tp=32, replicas=16), EngineLayout(tp=8, dp=8, ep=1, replicas=8))),
    "nemotron-ultra-550b": (TrainerLayout(8, 4, 2, 16), (EngineLayout(tp=8, pp=4),)),
}


class Stacked:
    """Slots of a rank. Parts of one tensor are stored one after the other."""

    def __init__(self) -> None:
        self.slices: list[TensorSlice] = []
        self._filled: dict[str, int] = {}

    def add(self, tensor: Tensor, target: str, ways: int = 1, place: int = 0) -> None:
        """Add one of `ways` equal parts of a tensor along the axis that tensor parallelism divides."""
        if tensor.axis is None or ways == 1:
            self.add_box(tensor.name, target, Box.whole(tensor.shape))
            return
        first = 0
        for rows in tensor.sections:
            start, stop = first + rows * place // ways, first + rows * (place + 1) // ways
            ends = (stop, *tensor.shape[1:])
            self.add_box(tensor.name, target, Box((start, *(0 for _ in tensor.shape[1:])), ends))
            first += rows
        if tensor.sections:
            return
        size = tensor.shape[tensor.axis] / ways
        starts, stops = [0] * len(tensor.shape), list(tensor.shape)
        starts[tensor.axis], stops[tensor.axis] = round(place * size), round((place + 1) * size)
        self.add_box(tensor.name, target, Box(tuple(starts), tuple(stops)))

    def add_box(self, name: str, target: str, box: Box) -> None:
        first = self._filled.get(target, 0)
        self.slices.append(TensorSlice(name, box, Address(target, first, contiguous_strides(box.sizes))))
        self._filled[target] = first + box.numel


def fused_rows(model: Model, ways: int, place: int) -> list[tuple[int, int, int]]:
    """Return a rank's rows of Megatron's linear_qkv as (0, 1 or 2 for q, k or v; first row; row after the last).

    The rows are stored group after group, and divided among ranks evenly.
    """
    dim, share = model.head_dim, model.heads // model.kv_heads * model.head_dim
    size = model.kv_heads * (share + 2 * dim) // ways
    found, first = [], 0
    for group in range(model.kv_heads):
        for part, rows in enumerate((share, dim, dim)):
            start, stop = max(first, place * size), min(first + rows, (place + 1) * size)
            if start < stop:
                origin = group * rows - first
                found.append((part, start + origin, stop + origin))
            first += rows
    return found


def dense_slices(model: Model, trainer: TrainerLayout, stage: int, tp: int) -> list[TensorSlice]:
    """Slots of a Megatron rank without experts."""
    held = Stacked()
    rows: dict[str, list[tuple[int, int]]] = {"q": [], "k": [], "v": []}
    for part, start, stop in fused_rows(model, trainer.tp, tp) if model.heads else ():
        rows["qkv"[part]].append((start, stop))
    for tensor in by_stage(model, trainer.pp)[stage, None]:
        if tensor.part:
            for start, stop in rows[tensor.part]:
                held.add_box(tensor.name, tensor.fused, Box((start, 0), (stop, tensor.shape[1])))
        else:
            held.add(tensor, tensor.fused, trainer.tp, tp)
    return held.slices


def expert_slices(model: Model, trainer: TrainerLayout, stage: int, ep: int, etp: int) -> list[TensorSlice]:
    """Slots of a Megatron rank for experts."""
    held, count = Stacked(), model.experts // trainer.ep
    for expert in range(ep * count, (ep + 1) * count):
        for tensor in by_stage(model, trainer.pp).get((stage, expert), ()):
            held.add(tensor, f"{tensor.fused}.{expert}", trainer.etp, etp)
    return held.slices


def trainer_slices(model: Model, trainer: TrainerLayout, rank: int) -> list[TensorSlice]:
    """All slices of a Megatron rank. Ranks are laid out as `tp-ep-dp-pp`."""
    stage, place = divmod(rank, trainer.tp * trainer.dp)
    return [*dense_slices(model, trainer, stage, place % trainer.tp),
            *expert_slices(model, trainer, stage, place // trainer.etp % trainer.ep, place % trainer.etp)]


def trainer_holders(model: Model, trainer: TrainerLayout) -> Holders:
    """Return every box with the ranks that hold it."""
    boxes: dict[str, dict[Box, list[int]]] = {}
    width = trainer.tp * trainer.dp
    parts: list[tuple[list[TensorSlice], list[int]]] = []
    for stage in range(trainer.pp):
        ranks = range(stage * width, (stage + 1) * width)
        parts += [(dense_slices(model, trainer, stage, tp), list(ranks[tp::trainer.tp])) for tp in range(trainer.tp)]
        parts += [(expert_slices(model, trainer, stage, ep, etp),
                   list(ranks[ep * trainer.etp + etp::trainer.ep * trainer.etp]))
                  for ep in range(trainer.ep) for etp in range(trainer.etp)]
    for slices, ranks in parts:
        for part in slices:
            boxes.setdefault(part.name, {}).setdefault(part.box, []).extend(ranks)
    return {name: [Holder(box, tuple(sorted(ranks))) for box, ranks in held.items()] for name, held in boxes.items()}


def engine_specs(model: Model, engine: EngineLayout, stage: int, tp: int, place: int) -> RecvSpec:
    """Return what a worker needs. `place` is its index among the workers that share the experts."""
    taken, ways = Stacked(), engine.tp * engine.dp
    each, more = divmod(model.experts, ways)
    own = range(place * each + min(place, more), (place + 1) * each + min(place + 1, more))
    kv_ways = min(engine.tp, model.kv_heads)
    for tensor in by_stage(model, engine.pp)[stage, None]:
        if tensor.part in ("k", "v"):
            taken.add(tensor, tensor.fused, kv_ways, tp * kv_ways // engine.tp)
        else:
            taken.add(tensor, tensor.fused, engine.tp, tp)
    for expert in own if engine.ep else range(model.experts):
        for tensor in by_stage(model, engine.pp).get((stage, expert), ()):
            taken.add(tensor, tensor.fused, 1 if engine.ep else ways, 0 if engine.ep else place)
    return RecvSpec(tuple(sorted(taken.slices, key=lambda part: model.numbers[part.name])), ())


def all_specs(model: Model, engine: EngineLayout) -> dict[int, RecvSpec]:
    """Return what each worker needs. Workers with equal needs share an object."""
    kinds: dict[tuple[int, int, int], RecvSpec] = {}
    found = {}
    for worker in range(engine.workers):
        rest, tp = divmod(worker, engine.tp)
        rest, stage = divmod(rest, engine.pp)
        kind = stage, tp, rest % engine.dp * engine.tp + tp
        if kind not in kinds:
            kinds[kind] = engine_specs(model, engine, *kind)
        found[worker] = kinds[kind]
    return found
