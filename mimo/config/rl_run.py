"""All flags of a reinforcement-learning run, and the checks of them that need no process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, override

from mimo import registry
from mimo.config.checks import refuse, refuse_below
from mimo.config.optim import OptimConfig
from mimo.config.rl import RlConfig, RolloutConfig
from mimo.config.trainer import DataConfig, LayoutConfig, ObserveConfig, RunConfig, TrainConfig
from mimo.config.validate import validate
from mimo.grid.lanes import check_engine_tiles
from mimo.grid.spec import Layout
from mimo.protocols import ImageProcessorProvider
from mimo.text import counted

# Limits of gen-kl in nats. Correct refits reach at most 6e-4 in bfloat16 and 4e-13 in float32 on the CPU; wrong ones
# are above 1.
MAX_GEN_KL_BF16 = 0.05
MAX_GEN_KL_FP32 = 1e-4

DESCRIPTION = """Train a model with rewards for its own completions (GRPO and related methods), which vLLM generates.

Flags win over --config files, and later files win over earlier ones. The keys of a file are flag names."""
# The flags that `train_rl.py --help` opens with.
FIRST_FLAGS = {
    "--config FILE": "Read flags from a TOML file. The flags that you type win.",
    "--model-provider NAME": "Model family, such as causal_lm, nemotron_h or llava (docs/providers.md).",
    "--load-hf MODEL": "Start from Hugging Face weights: a folder or a hub id; --load with --finetune: a checkpoint.",
    "--dataset-provider NAME": "Prompts: conversations, digits, gsm8k, ... or pkg.module:attr (docs/rl_engine.md).",
    "--reward NAME": "Reward: gsm8k, math-verify, exact-match, multiple-choice or pkg.module:fn.",
    "--completions-per-prompt N": "Completions of each prompt. --global-batch-size counts all completions.",
    "--llm-dp N": "Number of trainer replicas. --llm-tp splits each of them over several ranks.",
    "--engine-placement WHERE": "Where vLLM runs: separate (own GPUs), colocated (the trainer's GPUs) or ray.",
    "--train-iters N": "Number of iterations.",
    "--dry-run": "Check all flags and print the plan, without a GPU and without starting anything.",
}


# The trainer's sections, with other defaults and with help for the flags that mean something else in train_rl.py.


@dataclass(frozen=True)
class RlTrainConfig(TrainConfig):
    """Run: batch sizes, length, evaluation, device, safety."""

    micro_batch_size: int = 1
    """train_hetero.py only: --max-tokens-per-microbatch makes the microbatches."""
    global_batch_size: int = 8
    """Completions of one iteration; a multiple of --completions-per-prompt."""
    seq_length: int = 2048
    """Largest number of tokens of a prompt and its completion together, after image expansion."""
    train_samples: int | None = None
    """Length of the run in completions; schedules then count completions."""
    eval_interval: int = 0
    """Iterations between evaluations of --eval-prompts; 0: only before the first update and at the end."""
    eval_iters: int = 0
    """train_hetero.py only: --eval-prompts says how large an evaluation is."""
    num_generations: int = 20
    """Completions of held-out prompts to print after the last evaluation; needs --eval-prompts."""
    encoder_prefetch_depth: int = 0
    """train_hetero.py only."""
    dry_run: bool = False
    """Print grids, engine, GPUs and batch, check what the flags name, then exit; needs no GPU and starts nothing."""
    world_size: int | None = None
    """Number of trainer ranks for --dry-run. A run takes it from torchrun."""


@dataclass(frozen=True)
class RlLayoutConfig(LayoutConfig):
    """Grids: which ranks hold the encoder, which the language model, and how each is split."""

    llm_only: bool = False
    """train_hetero.py only: a model with an encoder is trained with it."""


@dataclass(frozen=True)
class RlOptimConfig(OptimConfig):
    """Optimizer: one per module, clipped by one global norm."""

    correct_encoder_grad_for_partial_participation: bool = False
    """train_hetero.py only."""


@dataclass(frozen=True)
class RlObserveConfig(ObserveConfig):
    """Logging: the run folder, TensorBoard, the console."""

    completions_interval: int | None = None
    """Iterations between those whose completions are recorded: generations.jsonl gets two prompts of the first
    iteration and of every n-th one, with rewards and advantages; 0: none. Default: a tenth of the run."""

    def records_completions(self, iteration: int, total_iterations: int) -> bool:
        """Return whether generations.jsonl has completions of an iteration, counted from 1."""
        interval = self.completions_interval
        if interval is None:
            interval = max(1, total_iterations // 10)
        return bool(self.generations_mib and interval) and (iteration == 1 or iteration % interval == 0)

    @override
    def check(self) -> None:
        super().check()
        refuse_below(self, {"completions_interval": 0})
        refuse(bool(self.completions_interval) and not self.generations_mib,
               f"--completions-interval {self.completions_interval} with --generations-mib 0, which writes no "
               "generations.jsonl: leave one of them out")


@dataclass(frozen=True)
class PromptDataConfig(DataConfig):
    """Data: which prompts."""

    dataset_provider: str = "arithmetic"
    """Prompt data set: a name (arithmetic, conversations, digits, gsm8k) or pkg.module:attr."""
    lane_loader: Literal["routed", "per-lane"] = "routed"
    """train_hetero.py only."""
    microbatch_order: Literal["images", "lengths", "read"] = "images"
    """train_hetero.py only."""
    row_lengths: int | None = None
    """train_hetero.py only."""
    skip_long_prompts: bool = False
    """Leave out the prompts of files to which --seq-length leaves no room for --max-completion-tokens; without it they
    are refused before the run begins."""


@dataclass(frozen=True)
class RlRunConfig(RunConfig):
    """Run of train_rl.py: the trainer's sections and those of the algorithm and the engine."""

    reads_prompts: ClassVar[bool] = True
    # With the usual rate, every step would change the routing of a trained model regardless of the rewards.
    family_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"moe_router_bias_update_rate": 0.0})

    train: RlTrainConfig = field(default_factory=RlTrainConfig)
    layout: RlLayoutConfig = field(default_factory=RlLayoutConfig)
    optim: RlOptimConfig = field(default_factory=RlOptimConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    observe: RlObserveConfig = field(default_factory=RlObserveConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    @override
    def resolved(self) -> RlRunConfig:
        return replace(self, rl=self.rl.resolved())

    @staticmethod
    def find_dataset(name: str) -> Any:
        """Return the prompt provider that `--dataset-provider` names."""
        return registry.prompt_provider(name)

    @property
    def max_gen_kl(self) -> float | None:
        """Limit of gen-kl in nats; None for no limit."""
        if self.rl.max_gen_kl is not None:
            return self.rl.max_gen_kl or None
        if self.rollout.rollout_mode != "sync" or self.rl.truncates_sampling:
            return None
        is_coarse = self.model.bf16 or self.rollout.engine_kv_cache_dtype == "fp8"
        return MAX_GEN_KL_BF16 if is_coarse else MAX_GEN_KL_FP32

    @property
    def lane_rows(self) -> int:
        """Parts of a microbatch, one for each encoder rank that serves its lane. Each part is some completions."""
        return max(1, self.layout.encoder_dp // self.layout.llm_dp)

    @property
    def text_tokens(self) -> tuple[int, str]:
        """Largest number of tokens in a microbatch, and its flag. With pipeline stages all are padded to it."""
        budget = self.rl.max_tokens_per_microbatch
        return budget, f"--max-tokens-per-microbatch {budget}"

    @property
    def prompts_per_step(self) -> int:
        """Prompts of a global batch."""
        return self.train.global_batch_size // self.rl.completions_per_prompt


def validate_rl(config: RlRunConfig, world_size: int, rank: int = 0) -> Layout:
    """Check a whole run and return the trainer's layout. The first rank also opens the prompts.

    Raises:
        ValueError: the first thing found wrong, naming flags, values and what would fit.
    """
    # Evaluations here use prompts, which the trainer's own checks do not know. Prefetch is refused below.
    train = replace(config.train, eval_interval=0, encoder_prefetch_depth=0)
    layout = validate(replace(config, train=train), world_size, rank)
    refuse(layout.kind == "homogeneous", "--layout homogeneous is not supported in RL yet: use colocated or disjoint")
    ahead = config.layout.encoder_run_ahead
    refuse(ahead > 0, f"--encoder-run-ahead {ahead} is not supported in RL yet: leave it out")
    config.rl.check()
    config.rollout.check()
    flags = config.rollout
    # On CPUs, an engine that Ray does not start may have any number of workers.
    on_gpus = config.train.device == "cuda" or (config.train.dry_run and config.train.device == "auto")
    refuse(flags.engine_placement == "colocated" and (on_gpus or bool(flags.ray_address))
           and flags.num_engine_workers > world_size,
           f"--engine-placement colocated: {flags.sizes} need {counted(flags.num_engine_workers, 'trainer rank')}, one "
           f"for each worker, and the run has {world_size}")
    _check_batch(config)
    _check_evaluation(config)
    _check_mode(config)
    _refuse_missing(config)
    _check_engine_model(config)
    if rank == 0:
        tokens = registry.model_provider(config.model.model_provider).token_spec(config.model_family)
        config.find_dataset(config.data.dataset_provider).validate(config.dataset, tokens)
    return layout


def _check_engine_model(config: RlRunConfig) -> None:
    """Refuse a model that cannot be described to the rollout engine."""
    provider, name = registry.model_provider(config.model.model_provider), config.model.model_provider
    if provider.encoders(config.model_family):
        refuse(not isinstance(provider, ImageProcessorProvider),
               f"--model-provider {name} has no image processor for the rollout engine (check_processor)")
        provider.check_processor(config.model_family)
    check_engine_tiles(config, provider)
    described = provider.hf_config(config.model_family)
    _check_engine_sizes(config.rollout, name, decoder_part(described))
    depths = described.get("num_nextn_predict_layers")
    refuse(bool(depths), f"--model-provider {name}: its configuration has num_nextn_predict_layers {depths}, layers "
           "of multi-token prediction, which would get no gradient here; give --hf-config a copy of the config.json "
           "with num_nextn_predict_layers 0, and loading skips their weights")


def decoder_part(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's part of a model's config.json."""
    part: Mapping[str, Any] = described.get("llm_config", described.get("text_config", described))
    return part


def _check_engine_sizes(flags: RolloutConfig, name: str, decoder: Mapping[str, Any]) -> None:
    """Refuse what vLLM would refuse when it starts, for the decoder's part of a model's config.json."""
    # Configurations of Nemotron-H have a number of experts even if their pattern has no layer of experts (E).
    has_experts = "E" in decoder.get("hybrid_override_pattern", "E") and any(
        decoder.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    refuse(flags.engine_share_experts and not has_experts, f"--engine-share-experts with --model-provider {name}: this "
           "model has no experts; leave it out, and the replicas run independently of each other")
    refuse(flags.engine_ep and not has_experts,
           f"--engine-ep with --model-provider {name}: this model has no experts; leave it out")
    refuse(flags.engine_kv_scales == "calibrated" and "kv_lora_rank" in decoder,
           f"--engine-kv-scales calibrated with --model-provider {name} is not supported: latent attention caches "
           "latents instead of keys and values; use --engine-kv-scales one")
    tp = flags.engine_tp
    heads, groups = (decoder.get(key, tp) for key in ("num_attention_heads", "num_key_value_heads"))
    refuse(heads % tp != 0, f"--engine-tp {tp} does not divide --num-attention-heads {heads}")
    refuse(bool(groups % tp and tp % groups), f"--engine-tp {tp} and --num-query-groups {groups}: one must divide the "
           "other")


def _check_batch(config: RlRunConfig) -> None:
    train, algorithm = config.train, config.rl
    each, budget = algorithm.completions_per_prompt, algorithm.max_tokens_per_microbatch
    tp, longest = config.layout.llm_tp, config.rollout.max_completion_tokens
    refuse(config.layout.sequence_parallel and budget % tp != 0,
           f"--max-tokens-per-microbatch {budget} is not divisible by --llm-tp {tp}, which --sequence-parallel needs; "
           f"nearest are {budget // tp * tp or tp} and {-(-budget // tp) * tp}")
    unit = 2 * config.layout.llm_cp * tp
    refuse(config.layout.llm_cp > 1 and budget % unit != 0,
           f"--max-tokens-per-microbatch {budget} is not divisible by {unit}, twice --llm-cp {config.layout.llm_cp} "
           f"times --llm-tp {tp}; nearest are {budget // unit * unit or unit} and {-(-budget // unit) * unit}")
    refuse(longest >= train.seq_length,
           f"--max-completion-tokens {longest} leaves no room for a prompt in --seq-length {train.seq_length}")
    refuse(train.global_batch_size % each != 0,
           f"--global-batch-size {train.global_batch_size} counts completions; it is not divisible by "
           f"--completions-per-prompt {each}; nearest are {train.global_batch_size // each * each or each} and "
           f"{-(-train.global_batch_size // each) * each}")
    updates, dp, prompts = algorithm.updates_per_rollout, config.layout.llm_dp, train.global_batch_size // each
    refuse(prompts % updates != 0, f"--updates-per-rollout {updates} does not divide the {prompts} prompts that "
           f"--global-batch-size {train.global_batch_size} and --completions-per-prompt {each} make")
    refuse(train.global_batch_size // updates % dp != 0,
           f"--updates-per-rollout {updates}: {train.global_batch_size // updates} completions of an update do not "
           f"divide over --llm-dp {dp}")
    refuse(train.micro_batch_size != 1, f"--micro-batch-size {train.micro_batch_size}: microbatches are made by "
           "--max-tokens-per-microbatch; leave it at 1")
    refuse(budget < train.seq_length, f"--max-tokens-per-microbatch {budget} is below --seq-length "
           f"{train.seq_length}, the longest prompt with its completion")
    refuse(config.data.lane_loader != DataConfig().lane_loader,
           f"--lane-loader {config.data.lane_loader}: the first rank reads the prompts; leave it out")
    refuse(config.data.microbatch_order != DataConfig().microbatch_order,
           f"--microbatch-order {config.data.microbatch_order}: an update orders its microbatches itself; leave it out")
    refuse(config.data.row_lengths != DataConfig().row_lengths,
           f"--row-lengths {config.data.row_lengths}: an update packs sequences into rows of its own; leave it out")
    refuse(config.model.cuda_graphs, "--cuda-graphs: rows of an update may have any length, and a graph has one; "
           "leave it out")
    refuse(config.model.fp8_primary_weights, "--fp8-primary-weights: refits and reference policies need the weights in "
           "bfloat16 in every iteration; leave it out")


def _check_evaluation(config: RlRunConfig) -> None:
    train, prompts = config.train, config.rl.eval_prompts
    refuse(train.eval_iters != 0, f"--eval-iters {train.eval_iters} is for train_hetero.py; --eval-prompts says how "
           "many held-out prompts an evaluation completes")
    refuse(train.eval_interval < 0, f"--eval-interval {train.eval_interval} is below 0")
    refuse(train.eval_interval > 0 and not prompts,
           f"--eval-interval {train.eval_interval} with --eval-prompts 0 evaluates nothing: set --eval-prompts")
    refuse(train.num_generations not in (0, TrainConfig().num_generations) and not prompts,
           f"--num-generations {train.num_generations} with --eval-prompts 0: completions of held-out prompts are "
           "shown at the end of an evaluation; set --eval-prompts")


def _check_mode(config: RlRunConfig) -> None:
    mode, correction = config.rollout.rollout_mode, config.rl.importance_correction
    quantization = config.rollout.engine_quantization
    refuse(quantization != "none" and (config.train.device == "cpu" or not config.model.bf16),
           f"--engine-quantization {quantization} needs --device cuda and --bf16")
    refuse(config.rollout.engine_kv_scales == "calibrated" and config.train.device == "cuda" and not config.model.bf16,
           "--engine-kv-scales calibrated with --device cuda needs --bf16: vLLM's FLASH_ATTN, which reads the scales, "
           "does not compute in float32")
    refuse(mode != "sync" and correction == "none",
           f"--rollout-mode {mode} with --importance-correction none: completions come from the policy before the "
           "last update, and the loss treats them as the current one's. Use --importance-correction token, icepop or "
           "sequence")
    refuse(mode != "sync" and config.rl.max_refills > 0, f"--rollout-mode {mode} with --max-refills "
           f"{config.rl.max_refills}: completions that are drawn beside the update are scored after it, when others "
           "would be late; use --rollout-mode sync")
    refuse(mode != "sync" and config.rollout.engine_placement == "colocated",
           f"--rollout-mode {mode} with --engine-placement colocated: the engine cannot generate beside the update on "
           "GPUs that it shares with it; use --rollout-mode sync")


def _refuse_missing(config: RlRunConfig) -> None:
    """Refuse flags that train_hetero.py honours and reinforcement learning cannot."""
    train = config.train
    encoders = registry.model_provider(config.model.model_provider).encoders(config.model_family)
    refuse(config.layout.llm_only and bool(encoders), f"--llm-only: the rollout engine has the encoder "
           f"{', '.join(encoders)} of --model-provider {config.model.model_provider}, whose weights come from here")
    refuse(config.optim.correct_encoder_grad_for_partial_participation,
           "--correct-encoder-grad-for-partial-participation is for train_hetero.py; leave it out")
    refuse(config.model.moe_token_dispatcher_type == "allgather",
           "--moe-token-dispatcher-type allgather is for train_hetero.py: rows of completions differ in length "
           "between ranks; use alltoall")
    refuse(train.encoder_prefetch_depth != 0,
           f"--encoder-prefetch-depth {train.encoder_prefetch_depth} is for train_hetero.py: the prompts of the next "
           "step are not known until the current one is over; leave it out")
    peak = config.observe.peak_tflops
    refuse(peak is not None and bool(encoders), f"--peak-tflops {peak} is not supported yet with the encoder "
           f"{', '.join(encoders)} of --model-provider {config.model.model_provider}: its FLOPs are not counted here; "
           "leave it out")
    family = vars(config.model_family)
    pattern = family.get("hybrid_layer_pattern") or ""
    refuse("/" in pattern, f"--hybrid-layer-pattern {pattern} has layers of multi-token prediction behind a /: they "
           f"would get no gradient here; use --hybrid-layer-pattern {pattern.partition('/')[0]}")
    for name in ("hidden_dropout", "attention_dropout"):
        refuse(bool(family.get(name)), f"--{name.replace('_', '-')} {family.get(name)}: the policy that is trained "
               "would not be the one that the engine samples from; use 0")
