"""Queries, keys and values of one matrix product, whose gradients need not be copied together again."""

from __future__ import annotations

from megatron.core.transformer import attention


def install_split() -> None:
    """Have the wheel's attention layers split by Transformer Engine's function, where it is installed.

    Gradients of a split that already lie in one tensor, as cuDNN's attention leaves them, are that tensor. The wheel
    looks for the function under a name that Transformer Engine has given up, and then takes `torch.split`.
    """
    if attention.SplitAlongDim is not None:
        return
    try:
        from transformer_engine.pytorch.utils import SplitAlongDim
    except ImportError:
        return
    attention.SplitAlongDim = SplitAlongDim.apply
