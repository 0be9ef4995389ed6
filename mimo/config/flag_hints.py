"""Flags of Megatron-LM and its recipes that do not exist here, and what to use instead of each."""

from __future__ import annotations

from collections.abc import Iterable

from mimo import registry
from mimo.config.toml_file import typed_fields

_FAMILY = "the model family decides that; leave it out"
_HF_CONFIG = "the model family and --hf-config decide that; leave it out"
_ALWAYS = "always on; leave it out"
_NO_OFFLOAD = ("activations stay on the device (docs/memory.md says why); use --recompute full, --llm-cp or "
               "--logits-chunk-size")
_TILING = "--image-tiling of the energon data set"

# Flag of Megatron-LM -> what to do instead.
FOREIGN_FLAGS = {
    # Optimizer, schedule, precision.
    "--learning-rate": "use --lr",
    "--min-learning-rate": "use --min-lr",
    "--optimizer": "the optimizer is always Adam with decoupled weight decay; leave it out",
    "--lr-warmup-fraction": "use --lr-warmup-iters or --lr-warmup-samples",
    "--decoupled-lr": "use --encoder-lr and --projector-lr",
    "--accumulate-allreduce-grads-in-fp32": "use --grad-reduce-in-fp32, which is on by default",
    "--grad-reduce-in-bf16": "use --no-grad-reduce-in-fp32",
    "--fp16": "use --bf16 (the default) or --no-bf16",
    "--fp32": "use --no-bf16",
    "--fp8": "use --fp8-format, and --encoder-fp8-format for the encoders",
    "--fp8-param-gather": "gathers stay in bfloat16; --fp8-primary-weights saves the memory of bfloat16 weights",
    "--fp8-margin": "it belongs to delayed scaling, which is not supported; leave it out",
    "--fp8-amax-history-len": "it belongs to delayed scaling, which is not supported; leave it out",
    "--fp8-amax-compute-algo": "it belongs to delayed scaling, which is not supported; leave it out",
    "--moe-router-padding-for-fp8": "the tokens of each expert are filled up for FP8 products anyway; leave it out",
    "--moe-router-padding-for-quantization": "the tokens of each expert are filled up for FP8 products anyway; leave "
                                             "it out",
    "--check-for-nan-in-loss-and-grad": "use --check-for-nan-in-loss, which is on by default",
    "--calculate-per-token-loss": "always on: the loss is the mean over the target tokens of the global batch; leave "
                                  "it out",
    "--cross-entropy-loss-fusion": "Transformer Engine's cross entropy is used with its layers; leave it out, or use "
                                   "--logits-chunk-size to save memory",
    "--cross-entropy-fusion-impl": "Transformer Engine's cross entropy is used with its layers; leave it out, or use "
                                   "--logits-chunk-size to save memory",
    # Grids.
    "--tensor-model-parallel-size": "use --llm-tp and --encoder-tp",
    "--pipeline-model-parallel-size": "use --llm-pp and --encoder-pp",
    "--context-parallel-size": "use --llm-cp",
    "--expert-model-parallel-size": "use --llm-ep",
    "--expert-tensor-parallel-size": "use --llm-expt-tp",
    "--data-parallel-size": "use --llm-dp and --encoder-dp",
    "--num-layers-per-virtual-pipeline-stage": "there is no interleaved schedule; leave it out",
    "--num-virtual-stages-per-pipeline-rank": "there is no interleaved schedule; leave it out",
    "--distributed-backend": "NCCL on CUDA and gloo on the CPU; leave it out",
    "--distributed-timeout-minutes": "use --watchdog-timeout-s",
    # Model.
    "--freeze-projection": "use --freeze projector",
    "--freeze-vit": "use --freeze vision",
    "--freeze-lm": "use --freeze language",
    "--freeze-vision": "use --freeze vision",
    "--freeze-projector": "use --freeze projector",
    "--freeze-language": "use --freeze language",
    "--mtp-num-layers": "--hybrid-layer-pattern has the layers of each depth of multi-token prediction "
                        "behind a slash; leave it out (where it was 0, add --vision-final-layernorm)",
    "--dynamic-resolution": "use --vision-dynamic-resolution",
    "--dynamic-resolution-min-patches": "use --min-patches of the energon data set",
    "--dynamic-resolution-max-patches": "use --max-patches of the energon data set",
    "--dynamic-resolution-min-side": "use --min-side of the energon data set",
    "--use-tiling": f"use {_TILING}",
    "--max-num-tiles": "use --max-tiles of the energon data set",
    "--img-h": "use --vision-image-size",
    "--img-w": "use --vision-image-size",
    "--patch-dim": "use --vision-patch-size",
    "--pixel-shuffle": "use --vision-pixel-shuffle",
    "--group-query-attention": "--num-query-groups alone decides that; leave it out",
    "--normalization": _FAMILY,
    "--swiglu": _FAMILY,
    "--squared-relu": _FAMILY,
    "--disable-bias-linear": _FAMILY,
    "--position-embedding-type": _HF_CONFIG,
    "--use-rotary-position-embeddings": _HF_CONFIG,
    "--rotary-percent": _HF_CONFIG,
    "--hybrid-override-pattern": "use --hybrid-layer-pattern",
    "--is-hybrid-model": _FAMILY,
    "--multi-latent-attention": _FAMILY,
    "--recompute-activations": "use --recompute selective",
    "--recompute-granularity": "use --recompute selective (with --recompute-modules) or --recompute full",
    "--cpu-offloading": _NO_OFFLOAD,
    "--cpu-offloading-num-layers": _NO_OFFLOAD,
    "--fine-grained-activation-offloading": _NO_OFFLOAD,
    "--offload-modules": _NO_OFFLOAD,
    "--use-mcore-models": _ALWAYS,
    "--use-flash-attn": "--transformer-impl transformer_engine chooses the kernel; leave it out",
    "--attention-backend": "--transformer-impl chooses the kernel; leave it out",
    "--moe-enable-deepep": "DeepEP has no package that could be installed; use --moe-token-dispatcher-type alltoall",
    "--moe-flex-dispatcher-backend": "the libraries of flex cannot be installed; use --moe-token-dispatcher-type "
                                     "alltoall",
    "--overlap-moe-expert-parallel-comm": "it needs Megatron's schedule of half layers, which grids of several modules "
                                          "do not have; leave it out, or use --moe-shared-expert-overlap",
    "--delay-wgrad-compute": "it belongs to an overlap of expert communication that is not supported; leave it out",
    "--moe-grouped-gemm": "always on with Transformer Engine; leave it out, or choose the kernels with --moe-gemm",
    "--moe-router-dtype": "always fp32; leave it out",
    "--pretrained-checkpoint": "use --load with --finetune, or --load-hf for a Hugging Face folder",
    # Data.
    "--mock-data": "use --dataset-provider mock",
    "--train-data-path": "use --data-path of the energon data set",
    "--tokenizer-model": "use --tokenizer of the energon data set",
    "--tokenizer-type": "use --tokenizer of the energon data set, a Hugging Face folder",
    "--tokenizer-prompt-format": "use --prompt-format of the energon data set",
    "--dataloader-type": "use --dataset-provider",
    "--variable-seq-lengths": "rows have the length of their microbatch's longest sample; see --row-lengths",
    "--packing-seq-length": "use --seq-length: a pack fills one row",
    # Checkpoints and logs.
    "--ckpt-format": "always torch_dist; leave it out",
    "--use-dist-ckpt": _ALWAYS,
    "--ckpt-fully-parallel-save": _ALWAYS,
    "--exit-signal-handler": "always on: SIGTERM saves and exits; leave it out",
    "--wandb-exp-name": "use --wandb-name",
    "--tensorboard-log-interval": "TensorBoard has every iteration; leave it out",
    "--log-throughput": _ALWAYS,
    "--timing-log-level": "use --timeline and --timeline-interval",
    "--profile": "use --profile-steps FIRST:LAST",
    "--use-pytorch-profiler": "use --profile-steps FIRST:LAST",
    "--profile-step-start": "use --profile-steps FIRST:LAST",
    "--profile-step-end": "use --profile-steps FIRST:LAST",
    "--record-memory-history": "use --memory-snapshot",
    "--memory-snapshot-path": "use --memory-snapshot, which writes into the run's folder",
    # Reinforcement learning.
    "--grpo-group-size": "use --completions-per-prompt of train_rl.py",
    "--grpo-kl-beta": "use --kl-coeff of train_rl.py",
    "--grpo-iterations": "use --updates-per-rollout of train_rl.py",
    "--grpo-clamp-eps-lower": "use --clip-ratio-low of train_rl.py",
    "--grpo-clamp-eps-upper": "use --clip-ratio-high of train_rl.py",
    "--grpo-entropy-term-weight": "use --entropy-coeff of train_rl.py",
}


def hint_for(flag: str) -> str | None:
    """Return advice on a flag that this run does not have, or None. `--no-x` is looked up as `--x` too."""
    for name in (flag, "--" + flag.removeprefix("--no-")):
        owners = _owners(name[2:].replace("-", "_"))
        if owners:
            return f"belongs to {' and to '.join(owners)}, which this run does not use"
        if name in FOREIGN_FLAGS:
            return f"is not a flag here: {FOREIGN_FLAGS[name]}"
    return None


def refuse_foreign_flags(argv: Iterable[str], known: Iterable[str]) -> None:
    """Raise one ValueError that lists the unknown flags of a command line for which there is a hint.

    `known` has the names of the run's fields, such as `micro_batch_size`.
    """
    known_fields, hints = set(known), {}
    for word in argv:
        flag = word.partition("=")[0].replace("_", "-")
        name = flag[2:].replace("-", "_")
        if word.startswith("--") and not {name, name.removeprefix("no_")} & known_fields:
            hints[flag] = hint_for(flag)
    lines = [f"{flag} {hint}" for flag, hint in hints.items() if hint is not None]
    if lines:
        raise ValueError("; ".join(lines))


def _owners(field: str) -> list[str]:
    """Return the programs and built-in providers that have a field, each as a user names it."""
    # Imported late: only a wrong flag needs it.
    from mimo.config.rl_run import RlRunConfig

    sections: list[type] = [type(getattr(RlRunConfig(), name)) for name in ("rl", "rollout", "data")]
    found = ["train_rl.py"] if any(field in typed_fields(section) for section in sections) else []
    for label, names, find in (
            ("--model-provider", registry.MODEL_PROVIDERS, registry.model_provider),
            ("--dataset-provider", registry.DATASET_PROVIDERS, registry.dataset_provider),
            ("train_rl.py --dataset-provider", registry.PROMPT_PROVIDERS, registry.prompt_provider)):
        owners = [name for name in names if field in typed_fields(find(name).Config)]
        if owners:
            found.append(f"{label} {', '.join(owners)}")
    return found
