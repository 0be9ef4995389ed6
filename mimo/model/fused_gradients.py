"""Weight gradients that Transformer Engine's matrix products add to the buffer of gradients themselves."""

from __future__ import annotations

from typing import Any

import torch


def accumulate_into_main_grad(module: torch.nn.Module) -> None:
    """Have the layers of a wrapped module add weight gradients to `main_grad` inside the matrix product.

    The wheel's flag for this, `gradient_accumulation_fusion`, asks for a kernel of apex too, for the output layer; and
    it makes layers without a buffer of gradients fail in their backward pass. Here it is a matter of the layers that
    have both. Without it every microbatch writes its gradients once in the parameters' precision, to be read and added.

    Args:
        module: a module in `DistributedDataParallel`, whose trainable parameters have `main_grad`; in place.
    """
    layer: Any
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True
            # Else the first pass of all would overwrite the buffer, and an encoder may have several before its first
            # backward one. (It is about copies of FP8 weights, of which there are none.)
            layer.disable_parameter_transpose_cache = True
