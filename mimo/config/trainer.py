"""All flags of a run in one frozen object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import realpath
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import tyro

from mimo import registry
from mimo.config.checks import MAX_SEED, MAX_TIMEOUT_S, refuse, refuse_below
from mimo.config.optim import OptimConfig, ScheduleConfig
from mimo.config.toml_file import field_name, flag_name
from mimo.protocols import LANGUAGE, Fp8


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: saving, resuming, pretrained weights."""

    save: str | None = None
    """Folder for the run's checkpoints. Without it nothing is saved."""
    load: str | None = None
    """Folder of checkpoints to continue from. If it is also --save and still empty, the run starts fresh. If it is
    another folder, the run starts from it once, and continues from --save as soon as that has a checkpoint of the
    run."""
    save_interval: int | None = None
    """Iterations between checkpoints. Without it the run saves only at the end and when it is told to stop."""
    keep_last: int | None = None
    """Number of complete checkpoints to keep. Older ones are deleted after each save. If --ckpt-step went back, the
    later checkpoints are not deleted. Default: keep all."""
    async_save: bool = False
    """Write checkpoints in the background; training stops only while its state is copied to host memory."""
    save_optim: bool = True
    """--no-save-optim leaves the optimizers out."""
    load_optim: bool = True
    """--no-load-optim starts with fresh optimizers."""
    load_scheduler: bool = True
    """--no-load-scheduler starts the learning-rate schedule anew."""
    save_rng: bool = True
    """--no-save-rng leaves the random generators out."""
    load_rng: bool = True
    """--no-load-rng keeps the generators as --seed sets them."""
    load_data: bool = True
    """--no-load-data starts the data set from its beginning, so that data, blend weights and data flags may change."""
    finetune: bool = False
    """Load only the weights. Iteration, optimizers, schedule, generators and data start anew. --save must be another
    folder than --load. A run that is started again continues from its own checkpoint in --save, with everything in
    it."""
    ckpt_step: int | None = None
    """Iteration to load from --load instead of the latest."""
    dist_ckpt_optim_fully_reshardable: bool = True
    """Accepted for scripts written for Megatron-LM. Optimizer state is always saved so that every layout can load
    it."""
    ckpt_verify: bool = True
    """Compare every tensor that is read with the checksum it was saved with."""
    checkpoint_timeout_s: float = 3600.0
    """Seconds that one save, or one load of a checkpoint or of pretrained weights, may take before the run reports what
    it waits for and ends with code 17; 0: no limit. With --async-save: seconds that training waits for the files of a
    save."""
    exit_duration_in_mins: float | None = None
    """Minutes after which the run saves and exits, counted from its start."""
    load_hf: str = ""
    """Hugging Face model (safetensors) whose weights the run starts from: a folder, or a model of the hub as
    organisation/name or organisation/name@revision."""
    load_vision_from: str = ""
    """Folder, or id on the hub, of a Hugging Face vision tower (CLIP, SigLIP) or model whose tower the encoders start
    from."""
    load_language_from: str = ""
    """Folder, or id on the hub, of a Hugging Face language model, or of a model whose language part the language module
    starts from."""
    allow_difference: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Name of a flag, such as norm-epsilon, whose value may differ from that of the weights or the checkpoint that the
    run starts from. Can be given several times. Every other difference is refused if it changes what the model computes
    or which samples come next."""

    @property
    def load_is_save(self) -> bool:
        """Whether --load and --save are the same folder, whatever their spelling."""
        return self.load is not None and self.save is not None and realpath(self.load) == realpath(self.save)

    @property
    def starts_elsewhere(self) -> bool:
        """Whether --load is neither the folder of --save nor a checkpoint in it.

        The run then starts from --load the first time, and continues from --save later. False without one of the two.
        """
        if self.load is None or self.save is None or self.load_is_save:
            return False
        folder, name = os.path.split(realpath(self.load))
        return folder != realpath(self.save) or not (name.startswith("iter_") or name == "release")

    @property
    def allowed_differences(self) -> frozenset[str]:
        """Field names of the flags in --allow-difference, which may be written with dashes."""
        return frozenset(field_name(key) for key in self.allow_difference)

    @property
    def has_pretrained(self) -> bool:
        """Whether some weights come from a Hugging Face folder."""
        return bool(self.load_hf or self.load_vision_from or self.load_language_from)

    def check(self) -> None:
        """Refuse values and combinations within this section. Raises ValueError."""
        refuse(not 0 <= self.checkpoint_timeout_s <= MAX_TIMEOUT_S,
               f"--checkpoint-timeout-s {self.checkpoint_timeout_s} is not at least 0 and at most {MAX_TIMEOUT_S:g} "
               "(a week)")
        refuse_below(self, {"save_interval": 1, "keep_last": 1, "ckpt_step": 0})
        for name in ("save_interval", "keep_last"):
            refuse(vars(self)[name] is not None and self.save is None,
                   f"{flag_name(name)} {vars(self)[name]} needs --save, the folder of the checkpoints")
        refuse(self.async_save and self.save is None, "--async-save needs --save, the folder of the checkpoints")
        refuse(self.ckpt_step is not None and self.load is None, f"--ckpt-step {self.ckpt_step} needs --load")
        refuse(self.finetune and self.load is None,
               "--finetune takes the weights of the checkpoint that --load names, and there is none")
        # After a restart, such a run could not tell its own checkpoints from those that it began with.
        refuse(self.finetune and self.save is not None and not self.starts_elsewhere,
               f"--finetune with --load {self.load} and --save {self.save}: it begins at iteration 0, and its "
               "checkpoints would take the place of those that it begins with; give --save another folder")
        minutes = self.exit_duration_in_mins
        refuse(minutes is not None and not minutes > 0, f"--exit-duration-in-mins {minutes} is not above 0")
        refuse(bool(self.load_hf) and bool(self.load_vision_from and self.load_language_from),
               "--load-hf with both --load-vision-from and --load-language-from leaves nothing for it to give")


@dataclass(frozen=True)
class DataConfig:
    """Data: which data set."""

    dataset_provider: str = "digits"
    """Data set: a name (arithmetic, conversations, digits, energon, mock) or pkg.module:attr."""
    lane_loader: Literal["routed", "per-lane"] = "routed"
    """Which ranks read data that is costly to read. routed: one rank reads each lane and sends the samples to the
    others. per-lane: every rank opens the lanes that it needs. Both give the same batches."""
    microbatch_order: Literal["images", "lengths", "read"] = "images"
    """Order of a lane's microbatches within an iteration. images: on disjoint grids and in homogeneous pipelines, those
    with the fewest pixels come first and last. lengths: if rows differ in length, neighbours are of similar length
    where pipeline stages or lanes wait for each other, which may need more memory; otherwise as images. read: in the
    order of the data set, which indexed data sets always keep if several encoder replicas share a lane."""
    row_lengths: int | None = None
    """Number of lengths that rows can have. The rows of a microbatch are as long as its longest sample, rounded up to a
    multiple of --seq-length / N, so that little padding is computed and few shapes occur. 1: all rows have --seq-length
    tokens. Default: 16; 1 where experts are split and --moe-token-dispatcher-type is allgather."""

    def check(self) -> None:
        """Refuse values within this section. Raises ValueError."""
        refuse_below(self, {"row_lengths": 1})


@dataclass(frozen=True)
class DdpConfig:
    """Data parallelism inside a module."""

    overlap_grad_reduce: bool = False
    """Reduce the language model's gradients while its backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather the language model's updated parameters during the next forward pass; needs --overlap-grad-reduce."""
    encoder_ddp_overlap: bool = False
    """Also reduce the encoders' gradients during the backward pass. Their parameters are always gathered without
    overlap."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in float32."""
    ddp_num_buckets: int | None = None
    """Number of gradient buckets."""
    ddp_bucket_size: int | None = None
    """Parameters in a gradient bucket."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets to a multiple of 2^16 per rank, where NCCL's bus bandwidth is highest."""

    def check(self) -> None:
        """Refuse values and combinations within this section. Raises ValueError."""
        refuse_below(self, {"ddp_num_buckets": 1, "ddp_bucket_size": 1})
        refuse(self.ddp_num_buckets is not None and self.ddp_bucket_size is not None,
               f"--ddp-num-buckets {self.ddp_num_buckets} and --ddp-bucket-size {self.ddp_bucket_size}: set one of "
               "them")
        for name in ("ddp_num_buckets", "ddp_bucket_size"):
            refuse(vars(self)[name] is not None and not self.overlap_grad_reduce,
                   f"{flag_name(name)} {vars(self)[name]} needs --overlap-grad-reduce: without it there is one bucket")
        refuse(self.overlap_param_gather and not self.overlap_grad_reduce,
               "--overlap-param-gather needs --overlap-grad-reduce")
        refuse(self.encoder_ddp_overlap and not self.overlap_grad_reduce,
               "--encoder-ddp-overlap needs --overlap-grad-reduce")


@dataclass(frozen=True)
class LayoutConfig:
    """Grids: which ranks hold the encoder, which the language model, and how each is split."""

    layout: Literal["disjoint", "colocated", "homogeneous"] = "disjoint"
    """disjoint: encoder and language model have separate ranks. colocated: every rank holds both, each with its own tp
    and dp. homogeneous: the encoder is on the ranks of the first language stage, split as it is."""
    llm_only: bool = False
    """Train the language model alone, on text. A data set with images is refused."""
    encoder_tp: int = 1
    """Tensor parallel size of the encoder."""
    encoder_dp: int = 1
    """Data parallel size of the encoder."""
    encoder_pp: int = 1
    """Pipeline stages of the encoder."""
    encoder_window: int | None = None
    """Colocated layout: encode the images of this many microbatches together, spread over all encoder replicas; 0
    takes the whole iteration. Default: 2 where the language model has pipeline stages or --llm-cp above 1, which
    need it; otherwise each replica encodes the images of its own lane, microbatch by microbatch."""
    encoder_balance: bool = True
    """With encoder windows, deal images to replicas by cost; --no-encoder-balance deals every replica the same
    number."""
    encoder_chunk: int = 0
    """With encoder windows, largest number of images in one forward pass of the encoder; 0: all that a replica has in a
    window."""
    encoder_activation_gib: float | None = None
    """With encoder windows, GiB of encoder activations that a rank may keep for the backward passes. Layers that would
    exceed it are recomputed. 0 is the same as --encoder-recompute full. Default: keep all."""
    encoder_run_ahead: int = 0
    """Disjoint layout: number of further microbatches of the same iteration that the encoder may encode while it would
    wait for gradients. Each keeps its activations. 0: none."""
    llm_offset: int | None = None
    """First rank of the language grid. Default: the rank after the encoder (disjoint) or 0 (colocated)."""
    llm_tp: int = 1
    """Tensor parallel size of the language model."""
    llm_cp: int = 1
    """Context parallel size of the language model: this many ranks share the tokens of each row. --seq-length has to be
    a multiple of twice this size (times --llm-tp)."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How Transformer Engine's attention exchanges keys and values between context-parallel ranks. p2p: in a ring;
    all_gather: all at once; a2a: each rank gets whole rows of some heads, whose number has to be divisible by --llm-cp.
    Local layers ignore it and gather."""
    llm_pp: int = 1
    """Pipeline stages of the language model."""
    llm_pp_layout: str | None = None
    """Layers of each pipeline stage, separated by commas, such as 16,24. Stages between the first and the last have the
    same number. Default: the same number on every stage."""
    llm_dp: int = 1
    """Data parallel size of the language model, the number of data lanes."""
    llm_ep: int = 1
    """Expert parallel size of the language model."""
    llm_expt_tp: int = 1
    """Tensor parallel size inside an expert."""
    sequence_parallel: bool = False
    """Sequence parallelism in the language model. It needs --llm-tp above 1. A mixture of experts with --llm-tp above 1
    requires it."""


RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj")
ENCODER_RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm")


@dataclass(frozen=True)
class ModelConfig:
    """Model: which family, precision, implementation, what is frozen."""

    model_provider: str = "llava"
    """Model family: a built-in name (docs/providers.md lists them) or pkg.module:attr. Without this flag, it is the
    family of the model in --hf-config, if there is one."""
    bf16: bool = True
    """Parameters and activations in bfloat16 (fp32 master weights); --no-bf16 trains in float32."""
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layer implementation. auto uses Transformer Engine on CUDA if it is installed, and local (plain PyTorch)
    otherwise."""
    freeze: str = ""
    """Parts that do not train, separated by commas: vision (an encoder's name), projector, language."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the language model: full keeps each layer's input only, selective recomputes
    --recompute-modules."""
    recompute_modules: str = ""
    """With --recompute selective, parts of each layer to recompute, separated by commas: core_attn (scores and weighted
    values; fused attention keeps none of them anyway), mlp (dense layers), moe (router, dispatch and experts), moe_act
    (the activation of experts in Transformer Engine's layers), shared_experts, layernorm (norms that stand alone) and
    mla_up_proj (latent attention). Default: core_attn."""
    recompute_num_layers: int | None = None
    """With --recompute full, recompute only this many layers of each pipeline stage, the first ones. Default: all."""
    encoder_recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the encoders."""
    encoder_recompute_modules: str = ""
    """With --encoder-recompute selective, parts of each layer to recompute, separated by commas: core_attn, mlp and
    layernorm. Default: core_attn."""
    logits_chunk_size: int | None = None
    """Tokens whose logits a rank has in memory at a time, for losses, evaluation, log-probs and entropies. The backward
    pass computes them again. For long rows and large vocabularies. Default: all tokens of a microbatch."""
    moe_permute_fusion: bool = True
    """Sort tokens by expert and back with Transformer Engine's fused kernels; --no-moe-permute-fusion uses several
    PyTorch kernels, as do --deterministic-mode and local layers."""
    moe_router_fusion: bool = False
    """Choose the experts and compute the load-balancing loss with Transformer Engine's fused kernels, which compute in
    float32 as the unfused code does. Two experts whose scores agree to the last bits of float32 may be ranked
    differently. --deterministic-mode and local layers use several PyTorch kernels all the same."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens get to the ranks of their experts (--llm-ep above 1). alltoall sends each token to the ranks that need
    it; allgather, which train_rl.py refuses, sends all tokens to all ranks. flex is refused."""
    moe_static_rows: bool = False
    """Give the experts of a rank room for all tokens that could come to them, so that --cuda-graphs launch whole layers
    with experts on several ranks. Needs --moe-token-dispatcher-type allgather, --moe-gemm packed and up to --llm-ep
    times the memory for the activations of experts. Local layers ignore it."""
    moe_shared_expert_overlap: bool = False
    """Compute shared experts while tokens travel. Needs --moe-token-dispatcher-type alltoall."""
    fp8_format: Literal["none", "e4m3", "hybrid"] = "none"
    """Multiply in FP8 in the language model's layers: e4m3 for everything, or hybrid with e5m2 for gradients. Norms,
    routers and embeddings keep their precision. Needs a Hopper GPU with Transformer Engine; local layers emulate it by
    rounding, on any device."""
    fp8_output_proj: bool = False
    """With --fp8-format, also compute logits in FP8, and the gradients of the output layer."""
    fp8_recipe: Literal["tensorwise", "blockwise", "delayed", "mxfp8"] = "tensorwise"
    """Scales of --fp8-format: tensorwise has one for each tensor, from its present values; blockwise one for each 128
    columns of a token and for each 128 x 128 block of a weight. delayed and mxfp8 are refused."""
    encoder_fp8_format: Literal["none", "e4m3", "hybrid"] = "none"
    """The same for the layers of the encoders; projectors keep their precision."""
    encoder_fp8_recipe: Literal["tensorwise", "blockwise", "delayed", "mxfp8"] = "tensorwise"
    """Scales of --encoder-fp8-format."""
    fp8_primary_weights: bool = False
    """Between updates, keep the weights of FP8 products in FP8 alone, so that beside activations there are no bfloat16
    ones. All results have the same bits. train_rl.py refuses it."""
    moe_gemm: Literal["auto", "packed", "cutlass", "separate"] = "auto"
    """How Transformer Engine's layers multiply by the weights of a layer's experts. packed: one cuBLASLt product for
    all experts, also for weight gradients (bfloat16, Hopper or newer, cuBLASLt 13.4 or newer; FP8, Hopper, cuBLASLt
    13.5, blockwise 13.6, or newer); cutlass: one CUTLASS kernel where Transformer Engine has one, which leaves out
    weight gradients and FP8; separate: one cuBLAS kernel for each expert. auto: packed where it can run, else cutlass,
    in FP8 separate; separate with --deterministic-mode. Local layers ignore it."""
    cuda_graphs: bool = False
    """Launch all kernels of the language model's layers at once, from CUDA graphs of each length of rows; with experts
    on several ranks, those of each layer up to its router. This pays if microbatches are small (docs/precision.md). A
    CPU runs the layers as they are. train_rl.py refuses it."""

    @property
    def frozen(self) -> frozenset[str]:
        """Parts named by --freeze."""
        return frozenset(part.strip() for part in self.freeze.split(",") if part.strip())

    def fp8(self, module: str) -> Fp8 | None:
        """Return which FP8 products a module computes; None if it computes none."""
        prefix = _prefix(module)
        chosen = vars(self)[f"{prefix}fp8_format"]
        if chosen == "none":
            return None
        return Fp8(chosen, vars(self)[f"{prefix}fp8_recipe"], flag_name(f"{prefix}fp8_format"),
                   self.fp8_output_proj and not prefix)

    def recomputed_modules(self, module: str) -> tuple[str, ...]:
        """Return the parts of a module's layers that selective recomputation computes again; empty without it."""
        prefix = _prefix(module)
        if vars(self)[f"{prefix}recompute"] != "selective":
            return ()
        given = vars(self)[f"{prefix}recompute_modules"] or "core_attn"
        return tuple(part.strip() for part in given.split(",") if part.strip())

    def _check_recompute(self) -> None:
        for module, known in ((LANGUAGE, RECOMPUTE_MODULES), ("encoder", ENCODER_RECOMPUTE_MODULES)):
            prefix = _prefix(module)
            how, given = vars(self)[f"{prefix}recompute"], vars(self)[f"{prefix}recompute_modules"]
            name = f"{flag_name(f'{prefix}recompute_modules')} {given}"
            refuse(bool(given) and how != "selective",
                   f"{name} needs {flag_name(f'{prefix}recompute')} selective, it is {how}")
            parts = self.recomputed_modules(module)
            refuse("gdn_norm_out" in parts, f"{name}: no model has layers of a gated delta net; leave gdn_norm_out out")
            unknown = ", ".join(part for part in parts if part not in known)
            refuse(bool(unknown), f"{name}: unknown part {unknown}; known are {', '.join(known)}")
            refuse(len(set(parts)) < len(parts), f"{name}: a part is named twice")
        refuse(self.transformer_impl == "local" and "moe_act" in self.recomputed_modules(LANGUAGE),
               f"--recompute-modules {self.recompute_modules} with --transformer-impl local: local layers compute "
               "experts one by one and cannot recompute moe_act; use moe")

    def check(self) -> None:
        """Refuse values and combinations within this section. Raises ValueError."""
        self._check_recompute()
        for prefix in ("", "encoder_"):
            name, recipe = flag_name(f"{prefix}fp8_recipe"), vars(self)[f"{prefix}fp8_recipe"]
            refuse(recipe == "delayed", f"{name} delayed is not supported: its scales come from a history of maxima "
                   "that would have to be shared by the ranks of a grid and saved; use tensorwise or blockwise")
            refuse(recipe == "mxfp8", f"{name} mxfp8 needs a Blackwell GPU and is not supported; use tensorwise or "
                   "blockwise")
            refuse(recipe != "tensorwise" and vars(self)[f"{prefix}fp8_format"] == "none",
                   f"{name} {recipe} needs {flag_name(f'{prefix}fp8_format')} e4m3 or hybrid")
        refuse(self.fp8_format != "none" and self.moe_gemm == "cutlass",
               f"--moe-gemm cutlass with --fp8-format {self.fp8_format}: it multiplies in bfloat16 only; leave one of "
               "them out")
        refuse(self.moe_token_dispatcher_type == "flex", "--moe-token-dispatcher-type flex is not supported: DeepEP "
               "and HybridEP have no package that could be installed, and NCCL EP needs NCCL 2.30.4, newer than "
               "PyTorch's; use alltoall or allgather")
        if self.moe_static_rows:
            refuse(self.moe_token_dispatcher_type != "allgather", "--moe-static-rows with --moe-token-dispatcher-type "
                   f"{self.moe_token_dispatcher_type}, for which the host has to know how many tokens ranks exchange; "
                   "use allgather")
            refuse(self.moe_gemm not in ("auto", "packed"), f"--moe-static-rows with --moe-gemm {self.moe_gemm}, for "
                   "which the host waits for the number of tokens of each expert; use packed")
            refuse(not self.moe_permute_fusion, "--moe-static-rows with --no-moe-permute-fusion: only the fused "
                   "kernels sort tokens without the host; leave out one of the two")
        if self.moe_shared_expert_overlap:
            refuse(self.moe_token_dispatcher_type != "alltoall", "--moe-shared-expert-overlap with "
                   f"--moe-token-dispatcher-type {self.moe_token_dispatcher_type}: only alltoall can overlap")
            refuse("shared_experts" in self.recomputed_modules(LANGUAGE), "--moe-shared-expert-overlap with "
                   f"--recompute-modules {self.recompute_modules}: shared experts that run while tokens travel "
                   "cannot be recomputed by themselves; use moe")
        refuse_below(self, {"recompute_num_layers": 1, "logits_chunk_size": 1})
        refuse(self.recompute_num_layers is not None and self.recompute != "full",
               f"--recompute-num-layers {self.recompute_num_layers} needs --recompute full, it is {self.recompute}")


def _prefix(module: str) -> str:
    """Return the prefix of flags that each grid has for itself, in field names."""
    return "" if module == LANGUAGE else "encoder_"


# MLflow tracking URIs that look like the name of a folder but mean a server.
NO_FOLDERS = ("databricks", "databricks-uc", "uc")


def is_folder(uri: str) -> bool:
    """Return whether MLflow keeps the runs of a tracking URI in files: it is a path or a `file:` URI."""
    return urlsplit(uri).scheme in ("", "file") and uri not in NO_FOLDERS


@dataclass(frozen=True)
class ObserveConfig:
    """Logging: the run folder, TensorBoard, the console."""

    run_dir: str = ""
    """Folder for metrics.jsonl, run_config.toml and other records. Default: a new folder runs/DATE-TIME-MODEL-DATA
    (runs/latest links to the newest), or the earlier folder of a run that resumes from its own checkpoint."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard. Without it no TensorBoard files are written."""
    tensorboard_by_samples: bool = False
    """Also plot every TensorBoard curve against consumed samples (TAG vs samples)."""
    log_interval: int = 1
    """Iterations between console lines; metrics.jsonl has every iteration."""
    progress: bool = True
    """Progress bar when the console is a terminal."""
    timeline: bool = True
    """Time what each rank does in a step. metrics.jsonl gets the times by module. `timeline/step-N.json` gets every
    interval of an early step, and of the current step when a rank gets SIGUSR2; `step-N.trace.json` has the same for
    Perfetto."""
    timeline_interval: int = 0
    """Iterations between further `timeline/step-N.json` files; 0: none."""
    generations_mib: int = 16
    """Largest size of generations.jsonl in MiB. The file has answers of the model with their images, for the report; 0:
    it is not written."""
    profile_steps: str | None = None
    """Trace the iterations FIRST:LAST (both included) with torch's profiler, into RUN_DIR/profile/rank-R.json.gz."""
    profile_ranks: str | None = None
    """Ranks to trace, such as 0,2. Default: rank 0; for --memory-snapshot all ranks."""
    memory_snapshot: bool = False
    """Record GPU memory. RUN_DIR/memory/rank-R.pickle is written at the end of the run, or when memory runs out."""
    nvtx: bool = False
    """Mark NVTX ranges with module, stage and microbatch, for Nsight Systems."""
    wandb_project: str | None = None
    """Send the figures to this Weights & Biases project."""
    wandb_name: str | None = None
    """Name of the run at Weights & Biases."""
    mlflow_uri: str | None = None
    """MLflow tracking URI that gets the figures: http(s) of a server, a folder, or a database such as
    sqlite:///FILE."""
    mlflow_experiment: str | None = None
    """MLflow experiment of the run. Default: mimo-hetero."""
    peak_tflops: float | None = None
    """TFLOP/s that a GPU can reach, for MFU. Default: dense bf16 of H100, H200, B200 or GB200, by the device's name;
    other devices have no MFU."""
    moe_per_layer_logging: bool = False
    """Also log MoE auxiliary losses of each layer."""

    @property
    def profiled_steps(self) -> range:
        """Iterations of --profile-steps; empty without it. Raises ValueError for an invalid range."""
        if self.profile_steps is None:
            return range(0)
        first, separator, last = self.profile_steps.partition(":")
        if not (separator and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError(f"--profile-steps {self.profile_steps} is not FIRST:LAST with 1 <= FIRST <= LAST, such as "
                             "10:12")
        return range(int(first), int(last) + 1)

    @property
    def profiled_ranks(self) -> tuple[int, ...]:
        """Ranks of --profile-ranks; empty without it. Raises ValueError for an invalid list."""
        if self.profile_ranks is None:
            return ()
        words = self.profile_ranks.split(",")
        if not all(word.isdecimal() for word in words):
            raise ValueError(f"--profile-ranks {self.profile_ranks} is not a list of ranks, such as 0,2")
        return tuple(int(word) for word in words)

    def check(self) -> None:
        """Refuse values and combinations within this section. Raises ValueError."""
        refuse(self.peak_tflops is not None and not self.peak_tflops > 0,
               f"--peak-tflops {self.peak_tflops} is not above 0")
        refuse_below(self, {"log_interval": 1, "timeline_interval": 0, "generations_mib": 0})
        refuse(self.timeline_interval > 0 and not self.timeline,
               f"--timeline-interval {self.timeline_interval} needs --timeline, it is --no-timeline")
        refuse(bool(self.profiled_ranks) and not self.profiled_steps and not self.memory_snapshot,
               f"--profile-ranks {self.profile_ranks} needs --profile-steps or --memory-snapshot")
        refuse(self.tensorboard_by_samples and self.tensorboard_dir is None,
               "--tensorboard-by-samples needs --tensorboard-dir")
        refuse(self.wandb_name is not None and self.wandb_project is None,
               f"--wandb-name {self.wandb_name} needs --wandb-project")
        refuse(self.mlflow_experiment is not None and self.mlflow_uri is None,
               f"--mlflow-experiment {self.mlflow_experiment} needs --mlflow-uri")


@dataclass(frozen=True)
class TrainConfig:
    """Run: batch sizes, length, evaluation, device, safety."""

    micro_batch_size: int = 1
    """Samples of one lane in one microbatch. A lane is the data of one language replica."""
    global_batch_size: int = 8
    """Samples of all lanes in one iteration; a multiple of micro-batch-size times llm-dp."""
    seq_length: int = 2048
    """Most tokens of a sample after image expansion; see --row-lengths for the padding."""
    train_iters: int | None = None
    """Length of the run in iterations (exclusive with --train-samples)."""
    train_samples: int | None = None
    """Length of the run in samples. The schedule then counts samples too."""
    eval_interval: int = 0
    """Iterations between evaluations; 0 evaluates only at the end."""
    eval_iters: int = 0
    """Global batches in an evaluation; 0 does not evaluate."""
    num_generations: int = 20
    """Held-out samples decoded greedily and printed after the last evaluation."""
    seed: int = 1234
    """Seed of parameters, dropout and sample order."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto uses CUDA if there is a GPU. cpu runs the same Megatron code under emulation, over gloo."""
    encoder_prefetch_depth: int = 0
    """Number of microbatches, those of later iterations included, that a frozen encoder may encode ahead while it
    waits; 0: none."""
    deterministic_mode: bool = False
    """Use only kernels and reductions that give the same bits every time. This is slower, but a resumed run repeats
    exactly."""
    check_for_nan_in_loss: bool = True
    """Stop with an error when the loss is not finite."""
    watchdog_timeout_s: float = 600.0
    """Seconds without progress after which a rank reports what it is waiting for and exits."""
    dry_run: bool = False
    """Print grids, lanes, parameters per rank and bridge bytes, then exit; needs no GPU."""
    world_size: int | None = None
    """Number of ranks for --dry-run. A run takes it from torchrun."""

    def check(self) -> None:
        """Refuse values and combinations within this section. Raises ValueError."""
        refuse_below(self, {"seq_length": 1, "train_iters": 1, "train_samples": 1, "eval_interval": 0, "eval_iters": 0,
                            "num_generations": 0, "seed": 0})
        refuse(self.seed > MAX_SEED, f"--seed {self.seed} is above {MAX_SEED}")
        refuse(not 0 < self.watchdog_timeout_s <= MAX_TIMEOUT_S,
               f"--watchdog-timeout-s {self.watchdog_timeout_s} is not above 0 and at most {MAX_TIMEOUT_S:g} (a week)")
        refuse(self.train_iters is not None and self.train_samples is not None,
               f"--train-iters {self.train_iters} and --train-samples {self.train_samples}: set one of them")
        refuse(self.train_iters is None and self.train_samples is None and not self.dry_run,
               "the run has no length: set --train-iters or --train-samples")
        refuse(self.eval_interval > 0 and self.eval_iters == 0,
               f"--eval-interval {self.eval_interval} with --eval-iters 0 evaluates nothing: set --eval-iters")


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run: a section for each concern, and the flags of the model family and the data set.

    Attributes:
        reads_prompts: whether the data set has prompts, which only the first rank opens.
        family_defaults: other defaults for the model provider's fields in this kind of run.
        model_family: an instance of the model provider's `Config`.
        dataset: an instance of the data provider's `Config`.
    """

    reads_prompts: ClassVar[bool] = False
    family_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    train: TrainConfig = field(default_factory=TrainConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    model_family: Any = None
    dataset: Any = None

    @property
    def lane_rows(self) -> int:
        """Rows of a lane's microbatch. If several encoder ranks serve a lane, they share its rows."""
        return self.train.micro_batch_size

    @property
    def text_tokens(self) -> tuple[int, str]:
        """Tokens of a microbatch, with padding, that the language grid's ranks share, and the flags that say so."""
        train = self.train
        return (train.seq_length * train.micro_batch_size,
                f"--seq-length {train.seq_length} * --micro-batch-size {train.micro_batch_size}")

    def resolved(self) -> Self:
        """Return the configuration with defaults filled in that depend on other flags."""
        return self

    @staticmethod
    def find_dataset(name: str) -> Any:
        """Return the data provider that `--dataset-provider` names. Raises ValueError for an unknown one."""
        return registry.dataset_provider(name)
