"""Private parts of Megatron Core 0.19.2 and Transformer Engine 2.20 that models rely on.

This module wraps the functions that are replaced or called. Methods that our subclasses override stay where the
subclass is, and `OVERRIDDEN` lists them. Review both when one of the packages is upgraded. tests/unit/test_compat.py
fails if a name is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.language_module import language_module
from megatron.core.models.mimo.config.role import RankRole
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

OVERRIDDEN = {
    # Latent attention builds exactly the layers of its spec and stays inside its groups.
    "megatron.core.transformer.multi_latent_attention.MLASelfAttention": (
        "_resolve_qk_norm_config", "_run_core_attention", "_qkv_down_projection"),
    # The loss and the returned logits both pass through it, so padding rows of the vocabulary are masked there.
    "megatron.core.models.gpt.gpt_model.GPTModel": ("_scale_logits",),
    # Modules are seeded one by one, and colocated grids have a bridge of their own.
    "megatron.core.models.mimo.model.base.MimoModel": (
        "_initialize_submodules", "_initialize_language_model", "_build_colocated_communicators"),
}
"""Class -> private methods of it that a subclass in `mimo.model` overrides."""

# Names in `fp8_copies`: the copy that a layer of one weight uses, and the one of `mimo.model.fp8.LastingCopies`.
WEIGHT, LASTING = "weight", "lasting"

# Rotary positions of packed and of plain rows. `mimo.model.layer_ops` has what replaces them.
rotary_of_packed_rows: Callable[..., Any] = rope_utils._apply_rotary_pos_emb_thd
rotary_of_rows: Callable[..., Any] = rope_utils._apply_rotary_pos_emb_bshd
rotate_half: Callable[..., Any] = rope_utils._rotate_half
# Transformer Engine's kernel for `[s, b, heads, channels]`, where all rows of the batch have the same positions; None
# without the package.
fused_rotary: Callable[..., Any] | None = rope_utils.fused_apply_rotary_pos_emb

# Counts the tokens of each expert, but applies the padding mask along the wrong axis.
apply_expert_bias: Callable[..., Any] = TopKRouter._apply_expert_bias


# Recomputes a part of a layer, but reads the states of generators and needs hooks of parameters.
checkpoint: Callable[..., Any] = tensor_parallel.checkpoint
# Balances the load of each sequence, but takes all sequences of a microbatch to have equally many tokens.
apply_sequence_loss: Callable[..., Any] = TopKRouter._apply_seq_aux_loss
# Megatron Core's routers count tokens as a float, and Transformer Engine's kernel reads an integer.
balancing_loss: Callable[..., Any] = router.switch_load_balancing_loss_func


def replace_rotary(packed: Callable[..., Any], plain: Callable[..., Any]) -> None:
    """Have Megatron Core's attention layers call these functions for packed and for plain rows."""
    rope_utils._apply_rotary_pos_emb_thd = packed
    rope_utils._apply_rotary_pos_emb_bshd = plain


def replace_apply_expert_bias(function: Callable[..., Any]) -> None:
    """Have Megatron Core's routers call `function`."""
    TopKRouter._apply_expert_bias = function


def replace_apply_sequence_loss(function: Callable[..., Any]) -> None:
    """Have Megatron Core's routers call `function`."""
    TopKRouter._apply_seq_aux_loss = function


def replace_balancing_loss(function: Callable[..., Any]) -> None:
    """Have Megatron Core's routers call `function`."""
    router.switch_load_balancing_loss_func = function


def overwrite_logits() -> None:
    """Have losses of Transformer Engine put the gradients where the logits were.

    Otherwise they keep a copy of the logits, which needs as much memory, and time. Nothing reads logits after the
    backward pass of their loss.
    """
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    def losses(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup,
               is_cg_capturable: bool = False) -> Any:
        return parallel_cross_entropy(logits.contiguous(), labels, dist_process_group=group, overwrite_input=True)

    language_module.te_parallel_cross_entropy = losses


def replace_share_storage(function: Callable[[Any, Any], None]) -> None:
    """Have `CheckpointWithoutOutput` call `function` with an emptied output and its recomputed values.

    Megatron Core's own function compiles a C++ extension at the first backward pass on every rank, which needs a
    compiler and ninja.
    """
    from megatron.core.tensor_parallel import random

    random._get_share_storage = lambda: function


def checkpoint_without_fp8() -> None:
    """Have `CheckpointWithoutOutput` leave Transformer Engine's FP8 state alone, for layers in plain PyTorch.

    Its default for FP8 is False, which it treats as a request, and it fails if Transformer Engine is not installed.
    """
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def replace_checkpoint(function: Callable[..., Any]) -> None:
    """Have Megatron Core's layers call `function` where they recompute a part."""
    tensor_parallel.checkpoint = function


def parts_of_layer(layer: Any) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the methods of a transformer layer that run what comes before the MLP, from the MLP on, and after it.

    The first one takes the arguments of the layer and returns hidden states and a context. The second one takes these
    hidden states, and by name the `padding_mask` and `packed_seq_params` of the layer. The third one takes the output
    of the MLP with its bias, and the hidden states before the MLP. The public `forward` calls all three.
    """
    return layer._forward_attention, layer._forward_mlp, layer._forward_post_mlp


def replace_parts_of_layer(layer: Any, attention: Callable[..., Any], mlp: Callable[..., Any]) -> None:
    """Have the `forward` method of a transformer layer call other functions in place of the first two parts."""
    layer._forward_attention, layer._forward_mlp = attention, mlp


def has_parts(layer: Any) -> bool:
    """Return whether a layer consists of the parts of Megatron Core's own transformer layer.

    Hybrids have `MoETransformerLayer`, whose MLP differs only with Megatron Core's own graphs.
    """
    kind, names = type(layer), ("_forward_attention", "_forward_mlp", "_forward_post_mlp")
    return any(issubclass(kind, own) and all(getattr(kind, name) is getattr(own, name) for name in names)
               for own in (TransformerLayer, MoETransformerLayer))


def after_backward(function: Callable[[], Any]) -> None:
    """Call a function when the backward pass is over. To be called from a hook of a tensor.

    `DistributedDataParallel` of PyTorch does the same; there is no public name for it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def replace_product(layer: Any, product: Callable[..., Any]) -> None:
    """Have a linear layer in plain PyTorch call `product` with its own product, followed by the product's arguments.

    The public `forward` of Megatron Core's ColumnParallelLinear and RowParallelLinear would not do, because it also
    gathers, reduces and adds the bias.
    """
    layer._forward_impl = partial(product, layer._forward_impl)


def replace_mamba_packing_check(function: Callable[..., tuple[bool, str | None]]) -> None:
    """Have `MambaMixer` ask `function` whether rows may be packed.

    Megatron Core's own check asks for kernels that `mimo.model.torch_layers` replaces.
    """
    from megatron.core.ssm import mamba_mixer

    mamba_mixer._check_mamba_sequence_packing_support = function


def replace_mamba_row_order(undo: Callable[..., Any], redo: Callable[..., Any]) -> None:
    """Have Mamba-2 layers call `undo` before and `redo` after they scan the rows that context-parallel ranks share.

    For packed rows, Megatron Core's own functions need Transformer Engine.
    """
    from megatron.core.ssm import mamba_context_parallel

    mamba_context_parallel._undo_attention_load_balancing = undo
    mamba_context_parallel._redo_attention_load_balancing = redo


def role_from_grids(module_to_grid_map: Any) -> RankRole:
    """Return a rank's role in a layout in which a single grid must not count as colocated.

    The public `RankRole.build` calls this function only if the grids differ.
    """
    return RankRole._from_grid_map(module_to_grid_map)


def leave_counts_on_device(dispatcher: Any) -> None:
    """Have a token dispatcher keep the token counts of its experts on the device.

    Its own method copies them to the host and waits for the copy.
    """
    dispatcher._maybe_dtoh_and_synchronize = lambda point, tokens_per_expert=None: tokens_per_expert


def margins_of_norm(norm: Any) -> dict[str, int]:
    """Return how many multiprocessors a norm leaves to other kernels, by `forward`, `backward` and `inference`.

    `transformer_engine.pytorch.RMSNorm` reads them from the environment and has no public name for all three.
    """
    margins: dict[str, int] = norm._sm_margins
    return margins


def set_tensor_parallel_group(layer: Any, group: Any) -> None:
    """Give a replicated Transformer Engine layer the group that it was built without; leave other layers as they are.

    The constructor of Megatron Core's wrapper ignores the group of replicated layers.
    """
    if vars(layer).get("_tp_group", group) is None:
        layer._tp_group = group


def accumulate_weight_gradient(inputs: torch.Tensor, of_outputs: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the weight gradient of a product to a gradient buffer.

    Args:
        inputs: `[tokens, in]`.
        of_outputs: gradient of the outputs, `[tokens, out]`, of the same dtype.
        main_grad: the buffer, `[out, in]`, of any dtype.
    """
    if inputs.dtype == main_grad.dtype:
        torch.addmm(main_grad, of_outputs.t(), inputs, out=main_grad)
    elif inputs.is_cuda and transformer_engine.te_general_gemm is not None:
        # PyTorch cannot add a product of bfloat16 matrices to a float32 one.
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(inputs, of_outputs, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True,
                     grad=True)
    else:
        main_grad.add_(of_outputs.t().matmul(inputs))


def install_weight_gradients() -> None:
    """Have Megatron Core's linear layers call `accumulate_weight_gradient`, in place of a kernel of apex."""
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate_weight_gradient, wgrad_gemm_accum_fp16=accumulate_weight_gradient)


def fp8_quantizers(linear: Any) -> tuple[Any, Any, Any]:
    """Return the quantizers of a grouped layer's rows, weights and, if gradients are enabled, gradients of rows.

    The layer has one of each for every expert. They are all alike, as the recipe says that has been entered.
    """
    linear.init_fp8_metadata(num_gemms=linear.num_gemms)
    rows, weights, _, _, _, gradients = linear._get_quantizers()
    return rows[0], weights[0], gradients[0]


@torch.no_grad()
def new_fp8_copy(linear: Any) -> Any:
    """Quantise the weight of a Transformer Engine layer that may not have run yet, for products of both passes.

    `_get_weight_quantizers`: the layer itself makes a copy only in its first pass, and with the public
    `fp8_model_init` weights are never in bfloat16.
    """
    with get_fp8_context(linear.config):
        linear.init_fp8_metadata()
        (quantizer,) = linear._get_weight_quantizers()
        quantizer.set_usage(rowwise=True, columnwise=True)
        quantizer.internal = False  # the copy stays after the pass; the layer sets this each time
        return quantizer.quantize(linear.weight.detach(), dtype=linear.weight.dtype)


def fp8_copies(linear: Any) -> dict[str, Any]:
    """Return the dict in which a Transformer Engine layer keeps FP8 copies of its weights; see `mimo.model.fp8`.

    The public way to renew them, `is_first_microbatch`, also overwrites the gradient buffer.
    """
    copies: dict[str, Any] = linear._fp8_workspaces
    return copies


@torch.no_grad()
def renew_lasting_copy(linear: Any, quantise_into: Callable[[Any], Any]) -> None:
    """Have a layer use its lasting FP8 copy, if it has one and uses no copy or another one now.

    Args:
        linear: the layer.
        quantise_into: brings the copy up to date with the weight.
    """
    copies = fp8_copies(linear)
    copy = copies.get(LASTING)
    if copy is not None and copies.get(WEIGHT) is not copy:
        quantise_into(copy)
        copies[WEIGHT] = copy


def overwrite_grouped_tensor(old: Any, new: Any) -> None:
    """Copy quantised matrices into the memory of others of the same shapes."""
    for name in ("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv"):
        if getattr(new, name) is not None:
            getattr(old, name).copy_(getattr(new, name))


def reordered_grouped_tensor(tensor: Any, order: Any, offsets: Any, shape: tuple[int, int]) -> Any:
    """Describe quantised matrices of one shape, with a scale each, in another order than in memory.

    The layout of the scales has no public name.

    Args:
        tensor: Transformer Engine's grouped tensor.
        order: int64 `[matrices]`, the position in memory of each matrix.
        offsets: int64 `[matrices + 1]`, the number of elements before each matrix, and the number of all.
        shape: shape of one matrix.
    """
    count = len(order)
    scales = [None if each is None else each[order] for each in (tensor.scale_inv, tensor.columnwise_scale_inv)]
    return type(tensor)(
        shape=(count * shape[0], shape[1]), dtype=tensor.fake_dtype, num_tensors=count, shapes=[shape] * count,
        quantizer=tensor.quantizer, data=tensor.rowwise_data, columnwise_data=tensor.columnwise_data,
        scale_inv=scales[0], columnwise_scale_inv=scales[1], tensor_offsets=offsets,
        with_gemm_swizzled_scales=tensor._with_gemm_swizzled_scales)
