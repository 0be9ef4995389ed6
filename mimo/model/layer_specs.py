"""Layer specifications of decoders and vision transformers, with Transformer Engine or with plain PyTorch layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.vision.vit_layer_specs import (
    get_vit_layer_with_local_spec,
    get_vit_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mimo.model.attention import (
    ContextParallelAttention,
    LatentAttention,
    LatentContextParallelAttention,
    LatentDotProductAttention,
    PackedDotProductAttention,
    with_epsilon,
)
from mimo.model.torch_layers.norms import Norm

IMPLS = ("local", "transformer_engine")


def norm_builder(impl: str) -> Any:
    """Return the norm class of an implementation, to be called as `norm(config=, hidden_size=, eps=)`.

    `local` has our own norm, because Megatron Core's PyTorch norm refuses sequence parallelism.
    """
    check_impl(impl)
    if impl == "local":
        return Norm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def decoder_layer_spec(config: TransformerConfig, impl: str, stage: int = 0) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage of a decoder, dense or MoE, and its final norm.

    Args:
        config: `num_layers`, `num_moe_experts`, `moe_grouped_gemm`, `qk_layernorm` and the pipeline size are read.
            Every layer is an MoE layer if `num_moe_experts` is set.
        impl: `local` or `transformer_engine`.
        stage: pipeline stage, from 0.

    Raises:
        ValueError: unknown `impl`.
    """
    check_impl(impl)
    if impl == "local":
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        spec = _with_own_parts(spec, moe=config.num_moe_experts is not None,
                               shares_rows=config.context_parallel_size > 1)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm)
    return _block(config, spec, impl, stage)


def mixed_decoder_spec(
    config: MLATransformerConfig, impl: str, stage: int, latent_norm_epsilon: float
) -> TransformerBlockSubmodules:
    """Return the dense and MoE layers of one pipeline stage of a decoder with latent attention, and its final norm.

    Args:
        config: `num_layers`, `moe_layer_freq` (a list of 0 for dense and 1 for MoE, for all layers; 1: all are MoE),
            `num_moe_experts`, `moe_grouped_gemm` and the pipeline size are read.
        impl: `local` or `transformer_engine`.
        stage: pipeline stage, from 0.
        latent_norm_epsilon: epsilon of the norms on compressed queries and keys.

    Raises:
        ValueError: unknown `impl`.
    """
    check_impl(impl)
    kinds = config.moe_layer_freq
    if isinstance(kinds, int):
        kinds = [kinds] * config.num_layers
    assert len(kinds) == config.num_layers and set(kinds) <= {0, 1}, kinds
    first = get_transformer_layer_offset(config, pp_rank=stage)
    specs = {kind: _latent_layer(config, impl, bool(kind), latent_norm_epsilon) for kind in (0, 1)}
    layers = [specs[kind] for kind in kinds[first:first + get_num_layers_to_build(config, pp_rank=stage)]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_builder(impl))


def vit_layer_spec(config: TransformerConfig, impl: str) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage of a vision transformer, whose attention is bidirectional.

    Args:
        config: `num_layers` and the pipeline size are read.
        impl: `local` or `transformer_engine`.

    Raises:
        ValueError: unknown `impl`.
    """
    check_impl(impl)
    if impl == "local":
        return _block(config, _with_own_parts(get_vit_layer_with_local_spec(), moe=False), impl)
    from mimo.model.layer_ops import LayerNormColumnParallelWithBias, RowParallelWithBias

    spec = get_vit_layer_with_transformer_engine_spec()
    attention = spec.submodules.self_attention
    attention = replace(attention, submodules=replace(attention.submodules, linear_proj=RowParallelWithBias))
    mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(
        linear_fc1=LayerNormColumnParallelWithBias, linear_fc2=RowParallelWithBias))
    return _block(config, replace(spec, submodules=replace(spec.submodules, self_attention=attention, mlp=mlp)), impl)


def mlp_linears(impl: str) -> MLPSubmodules:
    """Return the linear layers of a stand-alone MLP without a norm. Raises ValueError for an unknown `impl`."""
    check_impl(impl)
    if impl == "local":
        return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    from mimo.model.layer_ops import ColumnParallelWithBias, RowParallelWithBias

    return MLPSubmodules(linear_fc1=ColumnParallelWithBias, linear_fc2=RowParallelWithBias)


def check_impl(impl: str) -> None:
    if impl not in IMPLS:
        raise ValueError(f"--transformer-impl {impl}: layers exist for {' and '.join(IMPLS)}")


def _block(config: TransformerConfig, layer: ModuleSpec, impl: str, stage: int = 0) -> TransformerBlockSubmodules:
    layers = [layer] * get_num_layers_to_build(config, pp_rank=stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_builder(impl))


def _with_own_parts(spec: ModuleSpec, *, moe: bool, shares_rows: bool = False) -> ModuleSpec:
    """Return Megatron Core's local layer with our norms and attention.

    In checkpoints, it has the names of Transformer Engine's layer. That one fuses each norm into the linear layer that
    follows, but an MoE layer has none to fuse into.
    """
    layer = spec.submodules
    attention = replace(layer.self_attention.submodules, core_attention=(
        ContextParallelAttention if shares_rows else PackedDotProductAttention))
    if attention.q_layernorm not in (None, IdentityOp):
        attention = replace(attention, q_layernorm=Norm, k_layernorm=Norm)
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not moe:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    self_attention = replace(layer.self_attention, submodules=attention)
    return replace(spec, submodules=replace(
        layer, input_layernorm=Norm, pre_mlp_layernorm=Norm, self_attention=self_attention,
        sharded_state_dict_keys_map=names))


def _latent_layer(config: MLATransformerConfig, impl: str, moe: bool, epsilon: float) -> ModuleSpec:
    """Return Megatron Core's layer with `LatentAttention`, under the checkpoint names of Transformer Engine's layer.

    Transformer Engine's layer fuses the norms of compressed queries and keys into the up projections, and has one
    epsilon for all norms. If these norms have another one, they stand alone.
    """
    experts, grouped = (config.num_moe_experts, config.moe_grouped_gemm) if moe else (None, False)
    if impl == "local":
        spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=grouped, qk_layernorm=True,
                                        multi_latent_attention=True, normalization=config.normalization)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=grouped,
                                                          qk_layernorm=True, multi_latent_attention=True)
    layer = spec.submodules
    attention, names = layer.self_attention.submodules, {}
    if impl == "local" or epsilon != config.layernorm_epsilon:
        norm, linear = with_epsilon(norm_builder(impl), epsilon), attention.linear_q_proj
        attention = replace(attention, q_layernorm=norm, kv_layernorm=norm, linear_q_up_proj=linear,
                            linear_kv_up_proj=linear)
        names = {f"self_attention.{kind}_layernorm.": f"self_attention.linear_{kind}_up_proj.layer_norm_"
                 for kind in ("q", "kv")}
    if impl == "local":
        attention = replace(attention, core_attention=(
            LatentContextParallelAttention if config.context_parallel_size > 1 else LatentDotProductAttention))
        layer = replace(layer, input_layernorm=Norm, pre_mlp_layernorm=Norm)
        if not moe:
            names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    self_attention = replace(layer.self_attention, module=LatentAttention, submodules=attention)
    return replace(spec, submodules=replace(
        layer, self_attention=self_attention, sharded_state_dict_keys_map=names))
