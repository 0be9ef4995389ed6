"""Shapes of large mixtures of experts, and where each tensor belongs, for benchmarks that make no tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from mimo.refit.tensor_slices import Entry


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model.

    Attributes:
        name: Hugging Face's.
        shape: of the whole.
        layer: its number; -1 for what is before the first, the number of layers for what is after the last.
        fused: the engine's tensor that it is stacked in.
        axis: that tensor parallelism divides, None for none.
        expert: its number, None for what is no expert's.
        part: q, k or v of grouped-query attention, else nothing.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    fused: str
    axis: int | None = None
    expert: int | None = None
    part: str = ""


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
    def entries(self) -> list[Entry]:
        """The chunk plan's; what decides about routing stays float32."""
        return [Entry(each.name, "float32" if each.name.endswith("_bias") else "bfloat16", each.shape,
                      each.name.endswith("_bias")) for each in self.tensors]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Of each tensor in the chunk plan."""
        return {each.name: number for number, each in enumerate(self.tensors)}


@cache
def by_stage(model: Model, stages: int) -> dict[tuple[int, int | None], list[Tensor]]:
    """Tensors by pipeline stage and expert; stages differ by one layer at most."""
    ends = [model.layers * (stage + 1) // stages for stage in range(stages)]
    found: dict[tuple[int, int | None], list[Tensor]] = {}
    for tensor in model.tensors:
        stage = bisect_right(ends, min(max(tensor.layer, 0), model.layers - 1))
        found.setdefault((stage, tensor.expert), []).append(tensor)
    return found


def mlp(at: str, layer: int, hidden: int, inner: int, expert: int | None = None) -> list[Tensor]:
    """Gate, up and down projection of a layer, or of one of its experts."""
    fused = at if expert is None else at.rpartition(".")[0]
    return [Tensor(f"{at}.gate_proj.weight", (inner, hidden), layer, f"{fused}.w13", 0, expert),
            Tensor(f"{at}.up_proj.weight", (inner, hidden), layer, f"{fused}.w13", 0, expert),
            Tensor(f"{at}.down_proj.weight", (hidden, inner), layer, f"{fused}.w2", 1, expert)]


def alone(name: str, shape: tuple[int, ...], layer: int, axis: int | None = None) -> Tensor:
    """A tensor that is not fused."""
    return Tensor(name, shape, layer, name, axis)


def around(layers: Iterable[Tensor], count: int, vocabulary: int, hidden: int) -> tuple[Tensor, ...]:
    """Layers with embeddings before and the output layer after them."""
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
    """DeepSeek-V3: 3 dense layers, 58 of 256 experts and one that is shared, latent attention."""
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


MODELS: dict[str, Callable[[], Model]] = {"qwen3-235b-a22b": qwen3_235b_a22b, "deepseek-v3": deepseek_v3}
