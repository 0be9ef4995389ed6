"""Flags of the optimizers and of the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer: one per module, clipped by one global norm."""

    lr: float = 3e-4
    """Peak learning rate of the language model, and of every part without its own."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay; other parts keep the ratio min_lr / lr."""
    encoder_lr: float | None = None
    """Peak learning rate of the encoders; left out: --lr."""
    projector_lr: float | None = None
    """Peak learning rate of the projectors; left out: that of the encoders."""
    weight_decay: float = 0.01
    """Decoupled weight decay (not on biases and one-dimensional parameters)."""
    encoder_weight_decay: float | None = None
    """Weight decay of encoders and projectors; left out: --weight-decay."""
    adam_beta1: float = 0.9
    """Adam beta1."""
    adam_beta2: float = 0.95
    """Adam beta2."""
    adam_eps: float = 1e-8
    """Adam epsilon."""
    clip_grad: float = 1.0
    """Global gradient norm over all modules; 0 does not clip."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over each module's data-parallel ranks."""
    log_num_zeros_in_grad: bool = False
    """Count zero gradients (num-zeros)."""
    correct_encoder_grad_for_partial_participation: bool = False
    """Multiply encoder gradients by dp / (encoder ranks that saw an image).
    This is NOT the gradient of the loss: the uncorrected one already is the exact per-token mean.
    It exists to reproduce recipes that were tuned with it."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule, counted in iterations or, with --train-samples, in samples."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the decay."""
    lr_warmup_init: float = 0.0
    """Learning rate at the first step of the warm-up."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""
    lr_decay_iters: int | None = None
    """Iteration at which the decay ends, counted from the start of the run, warm-up included; afterwards --min-lr. Left
    out: the whole run."""
    lr_decay_samples: int | None = None
    """Samples at which the decay ends, counted from the start of the run, warm-up included; afterwards --min-lr. Left
    out: the whole run."""
    lr_wsd_decay_iters: int | None = None
    """WSD: length of the final decay in iterations; it ends where the decay ends."""
    lr_wsd_decay_samples: int | None = None
    """WSD: length of the final decay in samples; it ends where the decay ends."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """WSD: shape of the final decay."""
