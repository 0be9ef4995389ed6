"""Flags of the optimizers and of the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mimo.config.checks import refuse, refuse_below
from mimo.config.toml_file import flag_name

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer: one per module, clipped by one global norm."""

    lr: float = 3e-4
    """Peak learning rate of the language model, and of every part that has none of its own."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay. Other parts end at the same fraction of their own peak."""
    encoder_lr: float | None = None
    """Peak learning rate of the encoders. Default: --lr."""
    projector_lr: float | None = None
    """Peak learning rate of the projectors. Default: that of the encoders."""
    weight_decay: float = 0.01
    """Decoupled weight decay (not on biases and one-dimensional parameters)."""
    encoder_weight_decay: float | None = None
    """Weight decay of encoders and projectors. Default: --weight-decay."""
    adam_beta1: float = 0.9
    """Adam beta1."""
    adam_beta2: float = 0.95
    """Adam beta2."""
    adam_eps: float = 1e-8
    """Adam epsilon."""
    clip_grad: float = 1.0
    """Clip gradients to this norm, measured over all modules; 0: no clipping."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over each module's data-parallel ranks."""
    fused_optimizer_update: bool = True
    """With Transformer Engine's Adam and --use-distributed-optimizer, clip the gradients, update, and write the
    bfloat16 weights in one kernel; --no-fused-optimizer-update takes three passes. The results differ in the last bits.
    --use-precision-aware-optimizer always has Transformer Engine's own kernel."""
    use_precision_aware_optimizer: bool = False
    """Let Transformer Engine's Adam keep the float32 weights as the 16 bits that the bfloat16 weights lack, and its
    moments in the dtypes of --exp-avg-dtype and --exp-avg-sq-dtype. Saves 2 bytes a parameter with float32 moments and
    6 with bfloat16 moments, and a pass that copies the weights. Needs CUDA, --bf16 and --use-distributed-optimizer."""
    main_grads_dtype: Dtype = "fp32"
    """dtype of the gradients that Adam reads. bf16 needs --use-precision-aware-optimizer and
    --no-grad-reduce-in-fp32."""
    main_params_dtype: Dtype = "fp32"
    """dtype of the weights that Adam updates: only fp32."""
    exp_avg_dtype: Dtype = "fp32"
    """dtype of Adam's first moment with --use-precision-aware-optimizer: fp32, or bf16 together with
    --exp-avg-sq-dtype bf16. bfloat16 moments change what is computed; compare the losses."""
    exp_avg_sq_dtype: Dtype = "fp32"
    """dtype of Adam's second moment, with the same choices as --exp-avg-dtype."""
    log_num_zeros_in_grad: bool = False
    """Count the zeros in the gradients and log them as num-zeros."""
    correct_encoder_grad_for_partial_participation: bool = False
    """Multiply encoder gradients by dp / (encoder ranks that saw an image). The result is NOT the gradient of the loss;
    the uncorrected gradient already is the exact per-token mean. Use it only to reproduce recipes that were tuned with
    it."""

    def check(self) -> None:
        """Refuse values and combinations within this section. Raises ValueError."""
        for name in ("lr", "encoder_lr", "projector_lr", "adam_eps"):
            value = vars(self)[name]
            refuse(value is not None and not value > 0, f"{flag_name(name)} {value} is not above 0")
        refuse_below(self, {"min_lr": 0, "weight_decay": 0, "encoder_weight_decay": 0, "clip_grad": 0})
        refuse(self.min_lr > self.lr, f"--min-lr {self.min_lr} is above --lr {self.lr}")
        for name in ("adam_beta1", "adam_beta2"):
            refuse(not 0 <= vars(self)[name] < 1, f"{flag_name(name)} {vars(self)[name]} is not in [0, 1)")
        dtypes = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        given = " ".join(f"{flag_name(name)} {vars(self)[name]}" for name in dtypes if vars(self)[name] != "fp32")
        refuse(bool(given) and not self.use_precision_aware_optimizer,
               f"{given} needs --use-precision-aware-optimizer")
        for name in dtypes:
            refuse(vars(self)[name] in ("fp16", "fp8"),
                   f"{flag_name(name)} {vars(self)[name]} is not supported: such a state has a scale for each shard, "
                   "which a checkpoint for any layout cannot keep; use fp32 or, for moments, bf16")
        refuse(self.main_params_dtype != "fp32", f"--main-params-dtype {self.main_params_dtype}: Transformer Engine's "
               "Adam keeps float32 weights, of which it stores 16 bits; leave the flag out")
        refuse(self.exp_avg_dtype != self.exp_avg_sq_dtype,
               f"--exp-avg-dtype {self.exp_avg_dtype} with --exp-avg-sq-dtype {self.exp_avg_sq_dtype}: Adam would copy "
               "every moment to float32 in each step; give both the same dtype")
        refuse(self.use_precision_aware_optimizer and not self.use_distributed_optimizer,
               "--use-precision-aware-optimizer needs --use-distributed-optimizer, it is "
               "--no-use-distributed-optimizer")

    def bytes_per_parameter(self, bf16: bool) -> int:
        """Return the bytes of optimizer state of a parameter; `bf16` says whether the model's weights are bfloat16."""
        # bfloat16 weights have a float32 copy. A precision-aware optimizer stores only the half that they lack.
        copy = 2 if self.use_precision_aware_optimizer else 4 if bf16 else 0
        return copy + self.moment_bytes

    @property
    def moment_bytes(self) -> int:
        """Bytes of the two moments of a parameter, which exist from the first update on."""
        if self.use_precision_aware_optimizer:
            return sum(2 if dtype == "bf16" else 4 for dtype in (self.exp_avg_dtype, self.exp_avg_sq_dtype))
        return 8

    @property
    def saved_dtypes(self) -> dict[str, str | bool]:
        """Flags that decide the form in which optimizer state is saved, with their values."""
        return {flag_name(name): vars(self)[name]
                for name in ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")}


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
    """Iteration at which the decay ends, counted from the start of the run, warm-up included. After it the learning
    rate is --min-lr. Default: the end of the run."""
    lr_decay_samples: int | None = None
    """Number of samples at which the decay ends, counted from the start of the run, warm-up included. After it the
    learning rate is --min-lr. Default: the end of the run."""
    lr_wsd_decay_iters: int | None = None
    """WSD: length of the final decay in iterations. It ends at --lr-decay-iters."""
    lr_wsd_decay_samples: int | None = None
    """WSD: length of the final decay in samples. It ends at --lr-decay-samples."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """WSD: shape of the final decay."""

    def check(self) -> None:
        """Refuse values out of range. Raises ValueError. `validate` compares them with the length of the run."""
        refuse_below(self, {"lr_warmup_init": 0, "lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr_decay_iters": 1,
                            "lr_decay_samples": 1, "lr_wsd_decay_iters": 1, "lr_wsd_decay_samples": 1})
