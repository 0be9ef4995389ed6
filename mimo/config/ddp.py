"""Flags of the gradient and parameter communication of each module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DdpConfig:
    """Data parallelism inside a module."""

    overlap_grad_reduce: bool = False
    """Reduce the language model's gradients while its backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather the language model's updated parameters during the next forward pass; needs --overlap-grad-reduce."""
    encoder_ddp_overlap: bool = False
    """Reduce the encoders' gradients with overlap too; their parameters are always gathered without."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in float32."""
    ddp_num_buckets: int | None = None
    """Number of gradient buckets."""
    ddp_bucket_size: int | None = None
    """Parameters in a gradient bucket."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets to a multiple of 2^16 per rank, where NCCL's bus bandwidth is highest."""
