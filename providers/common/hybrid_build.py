"""Megatron's configuration and spec of a Nemotron-H-style decoder. Imports torch."""

from __future__ import annotations

from megatron.core.activations import squared_relu as compiled_squared_relu
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.model.language import HybridLanguageModel, hybrid_stack_spec
from mimo.model.submodule import squared_relu
from mimo.model.torch_layers.mamba import log_mamba_kernels, sort_shared_rows, use_torch_mamba
from mimo.platform import current_platform
from mimo.protocols import BuildContext
from providers.common.build import expert_fields, language_fields, language_params, transformer_config
from providers.common.hybrid import MAMBA, MOE, HybridConfig


def hybrid_config(config: HybridConfig, context: BuildContext | None) -> TransformerConfig:
    """Return Megatron's configuration of the decoder. `context` is None on ranks that do not build it."""
    assert context is None or context.recompute_num_layers is None, "the flags of a run have been checked"
    fused = context is not None and context.transformer_impl == "transformer_engine"
    fields = language_fields(config, context) | {
        "is_hybrid_model": True, "gated_linear_unit": False,
        # This function tells Megatron Core that experts multiply by the router's weights in the same kernel.
        "activation_func": compiled_squared_relu if fused else squared_relu, "use_fused_weighted_squared_relu": fused,
        "mamba_num_heads": config.mamba_num_heads, "mamba_head_dim": config.mamba_head_dim,
        "mamba_num_groups": config.mamba_num_groups, "mamba_state_dim": config.mamba_state_dim}
    if MOE in config.hybrid_layer_pattern:
        fields |= expert_fields(config, context) | {
            "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": config.moe_router_enable_expert_bias,
            "moe_router_bias_update_rate": config.moe_router_bias_update_rate,
            "moe_router_topk_scaling_factor": config.moe_router_topk_scaling_factor,
            "moe_router_force_load_balancing": config.moe_router_force_load_balancing, "moe_grouped_gemm": fused}
        if config.moe_latent_size:
            fields["moe_latent_size"] = config.moe_latent_size
    if config.num_mtp_depths:
        fields |= {"mtp_num_layers": config.num_mtp_depths, "mtp_loss_scaling_factor": config.mtp_loss_scaling_factor}
    return transformer_config(context, shares_rows=True, **fields)


def hybrid_spec(config: HybridConfig, context: BuildContext | None) -> ModuleSpec:
    """Return the spec of the decoder.

    Raises:
        ValueError: there are experts on a tensor-parallel grid without sequence parallelism.
    """
    built = hybrid_config(config, context)
    if MAMBA in config.hybrid_layer_pattern:
        # The first rank logs it, whether it builds the decoder or not.
        log_mamba_kernels()
    if context is None:
        return ModuleSpec(module=HybridLanguageModel, params={"config": built})
    tp, pp = context.grid.tp, context.grid.pp
    if MOE in config.hybrid_layer_pattern and tp > 1 and not context.sequence_parallel:
        raise ValueError(f"--num-experts {config.num_experts} with --llm-tp {tp} needs --sequence-parallel")
    if not current_platform().has_mamba_kernels():
        use_torch_mamba()
    sort_shared_rows()
    return ModuleSpec(module=HybridLanguageModel, params=language_params(config, context) | {
        "config": built,
        "hybrid_stack_spec": hybrid_stack_spec(built),
        "hybrid_layer_pattern": with_stages(config.hybrid_layer_pattern, pp),
        "position_embedding_type": "none",
    })


def with_stages(pattern: str, stages: int) -> str:
    """Return the pattern with a `|` between equal pipeline stages, the form that Megatron Core reads.

    >>> with_stages("MEM*/ME", 2)
    'ME|M*/ME'
    """
    layers, *depths = pattern.split("/")
    size = len(layers) // stages
    assert size * stages == len(layers), f"{len(layers)} layers over {stages} pipeline stages"
    parts = "|".join(layers[start:start + size] for start in range(0, len(layers), size))
    return "/".join([parts, *depths])
