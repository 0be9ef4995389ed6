"""Layers of a hybrid decoder (Mamba-2, attention, experts, dense MLP), with Transformer Engine or in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from mimo.model.latent_moe import LocalMoELayer
from mimo.model.layer_specs import IMPLS, norm_builder
from mimo.model.packed_attention import PackedDotProductAttention
from mimo.platform.norms import Norm


class Stack(HybridStack):
    """The wheel's stack with the final norm of the implementation that its layers have: the wheel knows one."""

    def __init__(self, config: TransformerConfig, submodules: HybridStackSubmodules, *, post_layer_norm: bool = True,
                 **stack: Any) -> None:
        super().__init__(config, submodules, post_layer_norm=False, **stack)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = norm_builder(config.transformer_impl)(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def hybrid_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Layers of every kind; the pattern chooses among them.

    Args:
        config: `transformer_impl`, `num_moe_experts` and `moe_grouped_gemm` are read.

    Raises:
        ValueError: unknown implementation.
    """
    impl = config.transformer_impl
    if impl not in IMPLS:
        raise ValueError(f"--transformer-impl {impl}: layers exist for {' and '.join(IMPLS)}")
    if impl == "transformer_engine":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as fused

        return replace(fused, module=Stack)
    return ModuleSpec(module=Stack, submodules=_local_layers(config))


def _local_layers(config: TransformerConfig) -> HybridStackSubmodules:
    """Norms stand alone here; checkpoints have the names of Transformer Engine layers, which fuse most of them."""
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(
        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear))
    attention = ModuleSpec(
        module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=PackedDotProductAttention, linear_proj=RowParallelLinear))
    dense = partial(MLP.as_mlp_submodule,
                    submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    experts = None
    if config.num_moe_experts:
        experts = ModuleSpec(module=MoETransformerLayer, submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm, mlp_bda=get_bias_dropout_add,
            mlp=_local_experts(config)))
    return HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(
            norm=Norm, mixer=mixer, mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"})),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(
            input_layernorm=Norm, self_attention=attention, self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"})),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm, mlp=dense, mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"})),
        moe_layer=experts,
        mtp_block_spec=_local_mtp())


def _local_experts(config: TransformerConfig) -> Any:
    """The wheel's builder of an MoE layer, building ours."""
    builder = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts,
                                  moe_grouped_gemm=config.moe_grouped_gemm)
    return partial(LocalMoELayer, **builder.keywords)


def _local_mtp() -> ModuleSpec:
    """Norms and projection of a depth of multi-token prediction; its layers come from the pattern."""
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=Norm))
    return ModuleSpec(module=MultiTokenPredictionBlock,
                      submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]))
