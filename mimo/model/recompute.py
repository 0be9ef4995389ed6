"""Recomputation of layers, or of parts of them, in the backward pass.

Megatron Core silently ignores parts that a layer does not have, and modules in evaluation mode. A run that asks for a
part that no layer has is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from mimo.comm import gather, raise_known_errors
from mimo.config.toml_file import flag_name
from mimo.config.trainer import ModelConfig
from mimo.grid.groups import Grids
from mimo.model import compat
from mimo.protocols import LANGUAGE


def prepare_recomputation(config: ModelConfig, grids: Grids, modules: dict[str, torch.nn.Module], impl: str) -> None:
    """Have layers recompute the parts that the flags name. Collective over the world.

    Args:
        config: the flags.
        grids: this rank's grids.
        modules: this rank's built modules by name.
        impl: the layer implementation.

    Raises:
        ValueError: no layer of any rank has one of the parts.
    """
    asked = {name: config.recomputed_modules(name) for name in grids.layout.grids}
    if not any(asked.values()):
        return
    compat.replace_share_storage(_fill_storage)
    if impl == "local":
        compat.checkpoint_without_fp8()
    here = {name: _install_recomputation(module) for name, module in modules.items()}
    everywhere = gather(grids, here)
    for name, parts in asked.items():
        found = set().union(*(rank.get(name, set()) for rank in everywhere))
        missing = [part for part in parts if part not in found]
        if missing:
            flag = flag_name("recompute_modules" if name == LANGUAGE else "encoder_recompute_modules")
            error = (f"{flag} {','.join(parts)} with --transformer-impl {impl}: no layer of {name} has "
                     f"{' or '.join(missing)} as a part of its own; leave {'it' if len(missing) == 1 else 'them'} out")
            raise_known_errors(grids, [error] * len(everywhere))


def recompute_frozen(module: torch.nn.Module) -> None:
    """Have a frozen language model recompute what its flags name, although it is in evaluation mode.

    The gradients of a projector pass through it, so its activations need as much memory as those of one that trains.
    Only the mode of the parts that decide about recomputation changes, and not that of the modules in them, such as
    dropout and routers.
    """
    for part in module.modules():
        if isinstance(part, (TransformerBlock, HybridStack, MultiTokenPredictionLayer)):
            part.training = part.config.recompute_granularity == "full"
        elif isinstance(part, Attention):
            part.training = part.checkpoint_core_attention
        elif isinstance(part, MoELayer):
            part.training = part.moe_layer_recompute


def _install_recomputation(module: torch.nn.Module) -> set[str]:
    """Prepare the layers of a module for the parts that they recompute. Return Megatron Core's names of these parts."""
    found = set()
    for part in module.modules():
        if isinstance(part, TransformerLayer):
            # A layer of a hybrid model may be an attention alone.
            part.recompute_mlp = part.recompute_mlp and not isinstance(part.mlp, IdentityOp)
            if part.recompute_mlp:
                part.mlp.forward = partial(_with_own_bias, part.mlp.forward)
            norms = part.recompute_input_layernorm or part.recompute_pre_mlp_layernorm
            found |= {name for name, recomputed in (("layernorm", norms), ("mlp", part.recompute_mlp)) if recomputed}
        elif isinstance(part, MoELayer):
            shared = part.shared_experts_recompute and part.shared_experts is not None
            found |= {name for name, recomputed in (("moe", part.moe_layer_recompute), ("shared_experts", shared))
                      if recomputed}
        elif isinstance(part, Attention) and part.checkpoint_core_attention:
            found.add("core_attn")
        elif isinstance(part, TEGroupedMLP) and part.activation_recompute:
            found.add("moe_act")
        if isinstance(part, MLASelfAttention) and part.recompute_up_proj:
            found.add("mla_up_proj")
    return found


def _with_own_bias(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, Any]:
    """Call an MLP, and return a copy of the bias that the layer will add.

    If the checkpointed function returned the parameter itself, autograd would take it for a result of that function.
    """
    output, bias = forward(*arguments, **keywords)
    return output, None if bias is None else bias.clone()


def _fill_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the bytes of a recomputed tensor into the emptied storage that autograd has kept.

    Views of `target` that other layers have saved then see them, and no version counter changes.
    """
    storage, found = target.untyped_storage(), source.untyped_storage()
    storage.resize_(found.nbytes())
    storage.copy_(found)
