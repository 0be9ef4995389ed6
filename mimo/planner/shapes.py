"""Figures of a module's layers that follow from the shapes of its parameters. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mimo.config.validate_fp8 import MTP
from mimo.protocols import ParameterShape


def num_layers(shapes: Sequence[ParameterShape]) -> int:
    """Return the number of layers of an encoder, from parameters that every layer has."""
    return max((shape.count for shape in shapes if shape.stage == "layer" and shape.split != "expert"), default=1)


def parameters(shapes: Sequence[ParameterShape], *, layers: bool, experts: bool = False) -> float:
    """Count the parameters inside or outside of the layers, either experts or all others."""
    return sum(math.prod(shape.shape) * shape.count for shape in shapes
               if (shape.stage == "layer") == layers and (shape.split == "expert") == experts)


def key_value_channels(shapes: Sequence[ParameterShape]) -> float | None:
    """Return the channels of a token's keys and values, the sum over the layers; None if they are not known."""
    found = {shape.name: shape for shape in shapes if shape.stage == "layer" and len(shape.shape) == 2}
    fused = next((shape for name, shape in found.items() if "linear_qkv" in name), None)
    output = next((shape for name, shape in found.items() if "linear_proj" in name), None)
    if fused is None or output is None:
        return None
    return (fused.shape[0] - output.shape[1]) * fused.count


def embedding_channels(shapes: Sequence[ParameterShape]) -> int:
    """Count the numbers of a patch before and after its embedding; 0 if an encoder's shapes have no embedding."""
    embedding = next((shape.shape for shape in shapes if shape.stage == "first" and len(shape.shape) > 1
                      and "position" not in shape.name), ())
    return math.prod(embedding[1:]) + embedding[0] if embedding else 0


def layers_with_experts(shapes: Sequence[ParameterShape], num_experts: int) -> float:
    """Return how many layers have experts, `num_experts` each."""
    return max((shape.count / num_experts for shape in shapes if shape.split == "expert"), default=0.0)


def parts_of_layers(shapes: Sequence[ParameterShape], hidden_size: int, num_experts: int) -> float:
    """Return the number of attentions, mixers and MLPs. Each of them ends in a product of the hidden size."""
    ends = [shape for shape in shapes
            if shape.stage == "layer" and shape.split == "tp" and shape.shape[0] == hidden_size]
    shared = any("shared_expert" in shape.name for shape in ends)
    return sum(shape.count for shape in ends) + (0.0 if shared else layers_with_experts(shapes, num_experts))


MTP_LAYER = f"{MTP}mtp_model_layer."


def kept_channels(shapes: Sequence[ParameterShape], layers: float, width: int, parts: Sequence[str], experts: float,
                  ) -> tuple[float, float]:
    """Return how many numbers all layers of a module keep for one token, without full recomputation.

    Only sequence parallelism divides the first figure, and tensor parallelism the second one.

    Each product keeps its input, and a layer keeps the outputs of its products until they have been used. Norms and
    residuals keep four times the width. For a Llama layer this is 17 numbers per token and channel. Norms of queries
    and keys keep their inputs, and attention then gets copies. Recomputed parts keep nothing of their own, and neither
    does the core of attention, which is taken as fused.

    Args:
        shapes: parameters of the module; those of its layers count.
        layers: number of layers.
        width: width of the hidden states.
        parts: parts of the layers that are recomputed.
        experts: share of the experts of a layer for whose inputs and outputs a token takes room.
    """
    whole, per_token = 4.0 * width * layers, 0.0
    has_norms = any(shape.name == "self_attention.q_layernorm.weight" for shape in shapes)
    for shape in shapes:
        if has_norms and shape.name == "self_attention.linear_qkv.weight":
            per_token += shape.count * shape.shape[0]
        if shape.stage == "layer" and len(shape.shape) == 2:
            kept = 0.0 if is_in(shape, parts) else float(max(shape.shape))
            if "moe_act" in parts and shape.name == "mlp.experts.linear_fc2.weight":
                kept -= shape.shape[1]
            per_token += shape.count * max(kept, 0.0) * (experts if shape.split == "expert" else 1.0)
        elif "layernorm" in parts and shape.name in ("input_layernorm.weight", "pre_mlp_layernorm.weight"):
            whole -= shape.count * width  # the output of a norm that stands alone
    return whole, per_token


def mtp_layers(shapes: Sequence[ParameterShape]) -> list[ParameterShape]:
    """Return the parameters of the layers of multi-token prediction under the names that a decoder's layers have."""
    return [replace(shape, name=shape.name.removeprefix(MTP_LAYER), stage="layer") for shape in shapes
            if shape.name.startswith(MTP_LAYER)]


def multiplies_in_fp8(shape: ParameterShape) -> bool:
    """Return whether a parameter is a weight that --fp8-format quantises; routers keep their precision."""
    in_layers = shape.stage == "layer" or shape.name.startswith(MTP)
    return in_layers and len(shape.shape) == 2 and "router" not in shape.name


def is_in(shape: ParameterShape, parts: Sequence[str]) -> bool:
    """Return whether a matrix belongs to a part of a layer that is recomputed; see --recompute-modules."""
    name = shape.name
    return (("mlp" in parts and name.startswith("mlp.linear_fc"))
            or ("moe" in parts and name.startswith("mlp.") and not name.startswith("mlp.linear_fc"))
            or ("shared_experts" in parts and name.startswith("mlp.shared_experts."))
            or ("mla_up_proj" in parts and name.endswith("_up_proj.weight")))
