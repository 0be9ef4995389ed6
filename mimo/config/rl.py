"""Flags of reinforcement learning: samples, advantages, losses, corrections, rewards."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from mimo import registry
from mimo.config.checks import MAX_TIMEOUT_S, is_above, is_least, refuse, refuse_below
from mimo.config.toml_file import flag_name

# vLLM replaces smaller temperatures by this one and only logs it (`_MAX_TEMP` of its sampling_params.py), while the
# trainer would divide by the smaller one.
MIN_TEMPERATURE = 0.01

Advantage = Literal["grpo", "dr-grpo", "rloo"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlType = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class LossDefaults:
    """Defaults of a policy loss for the flags of these names."""

    clip_ratio_low: float
    clip_ratio_high: float
    loss_aggregation: Aggregation


LOSS_DEFAULTS = {
    # The best range of arXiv:1707.06347, table 1. The mean over tokens is equation 8 of DAPO, arXiv:2503.14476, whose
    # upper bound is --clip-ratio-high 0.28.
    "ppo": LossDefaults(0.2, 0.2, "token-mean"),
    # Section 5.1 and equation 5 of arXiv:2507.18071. Ratios of sequences vary far less than those of tokens.
    "gspo": LossDefaults(3e-4, 4e-4, "seq-mean-token-mean"),
    # Equation 4 of arXiv:2506.13585, which has no lower bound and does not name the upper one. ScaleRL
    # (arXiv:2510.13786) chooses weights up to 5.
    "cispo": LossDefaults(1.0, 4.0, "token-mean"),
}


@dataclass(frozen=True)
class RlConfig:
    """Reinforcement learning: samples, advantages, policy loss, KL, importance correction, reward."""

    reward: str = "gsm8k"
    """Reward: a name (exact-match, gsm8k, math-verify, multiple-choice) or pkg.module:fn."""
    reward_threads: int = 1
    """Completions that are scored at the same time, each on a thread, for rewards that wait for a judge or a sandbox.
    Above 1, the reward has to be safe on several threads and cannot use signals."""
    completions_per_prompt: int = 8
    """Completions sampled for each prompt. Their rewards are compared with each other."""
    max_refills: int = 0
    """How often, in an iteration, further prompts are completed in place of those whose completions all have the same
    reward, which teach nothing (DAPO's dynamic sampling). If the batch is not full then, such prompts fill it.
    Only with --rollout-mode sync."""
    updates_per_rollout: int = 1
    """Optimizer steps on the completions of one rollout, each on an equal part of the prompts, in order. Ratios compare
    with the policy before the first of these steps."""
    temperature: float = 1.0
    """Sampling temperature: divides the logits in vLLM and in the trainer; at least 0.01."""
    top_p: float = 1.0
    """Sample only from the most likely tokens that together have this probability; 1: from all tokens."""
    top_k: int = 0
    """Sample only from this many most likely tokens; 0: from all tokens."""
    advantage: Advantage = "grpo"
    """Advantage of a completion over the others of its prompt: grpo (divided by the standard deviation), dr-grpo (not
    divided), rloo (compared with the mean of the others)."""
    policy_loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """ppo: clipped ratio of each token; gspo: of the whole sequence; cispo: clipped ratio as a constant weight."""
    clip_ratio_low: float | None = None
    """Ratios are clipped at 1 minus this. Default: 0.2 with ppo, 3e-4 with gspo, 1 (no bound) with cispo."""
    clip_ratio_high: float | None = None
    """Ratios are clipped at 1 plus this. Default: 0.2 with ppo, 4e-4 with gspo, 4 with cispo."""
    dual_clip_ratio: float | None = None
    """Upper bound of the ratio if the advantage is negative, such as 3. Default: none."""
    loss_aggregation: Aggregation | None = None
    """How the loss is averaged over the global batch: over tokens, over each sequence's mean, or over each sequence's
    sum divided by --loss-norm-length. Default: seq-mean-token-mean with gspo, else token-mean."""
    loss_norm_length: int | None = None
    """Tokens that divide a sequence's sum with --loss-aggregation seq-mean-token-sum-norm, such as the longest
    completion."""
    entropy_coeff: float = 0.0
    """Entropy bonus coefficient; 0: the entropy is only reported."""
    kl_coeff: float = 0.0
    """Coefficient of the KL divergence from the reference policy; 0: no reference policy."""
    ref_load: str = ""
    """Folder of a checkpoint with the weights of the reference policy. Without it and --ref-load-hf, the reference has
    the weights that the run starts from."""
    ref_load_hf: str = ""
    """Folder, or id on the hub, of a Hugging Face model (safetensors) with the weights of the reference policy."""
    kl_type: KlType = "k3"
    """Estimator of the KL divergence: the log ratio (k1), half its square (k2), or exp(-log ratio) - 1 + log ratio
    (k3)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL divergence to the loss, or subtract it from the reward."""
    importance_correction: Literal["none", "token", "icepop", "sequence"] = "token"
    """Weights that correct for the difference between rollout engine and trainer: token (at most --importance-cap),
    icepop (0 for tokens outside --importance-low to --importance-high), sequence (0 for sequences whose geometric mean
    is outside)."""
    importance_cap: float = 2.0
    """Largest weight with --importance-correction token."""
    importance_low: float | None = None
    """Smallest weight that is kept. Default: 0.5 with icepop, 0.999 with sequence."""
    importance_high: float | None = None
    """Largest weight that is kept. Default: 5 with icepop, 1.002 with sequence."""
    max_gen_kl: float | None = None
    """Largest gen-kl, the KL divergence between engine and trainer on sampled tokens in nats, before a run is stopped;
    0: no limit. Default: 0.05 in bfloat16 or with an FP8 cache, 1e-4 otherwise, and no limit with --rollout-mode
    one-step-off, --top-p or --top-k, where the two distributions differ by design."""
    max_tokens_per_microbatch: int = 8192
    """Largest number of tokens in a microbatch of whole sequences, prompts included."""
    eval_prompts: int = 0
    """Held-out prompts of an evaluation, one completion each: before the first update, every --eval-interval
    iterations and at the end; 0 does not evaluate."""
    eval_temperature: float = 0.0
    """Sampling temperature of evaluations; 0: the most likely token, else at least 0.01."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distances that a ratio may be below and above 1: the flags, or the defaults of the policy loss."""
        low, high, defaults = self.clip_ratio_low, self.clip_ratio_high, LOSS_DEFAULTS[self.policy_loss]
        return (defaults.clip_ratio_low if low is None else low, defaults.clip_ratio_high if high is None else high)

    @property
    def aggregation(self) -> Aggregation:
        """`--loss-aggregation`, or the default of the policy loss."""
        return self.loss_aggregation or LOSS_DEFAULTS[self.policy_loss].loss_aggregation

    def resolved(self) -> RlConfig:
        """Return the flags with the defaults of the policy loss filled in."""
        low, high = self.clip_range
        return replace(self, clip_ratio_low=low, clip_ratio_high=high, loss_aggregation=self.aggregation)

    @property
    def importance_band(self) -> tuple[float, float]:
        """Smallest and largest weight that is kept, with icepop and sequence."""
        low, high = (0.5, 5.0) if self.importance_correction == "icepop" else (0.999, 1.002)
        return (low if self.importance_low is None else self.importance_low,
                high if self.importance_high is None else self.importance_high)

    @property
    def truncates_sampling(self) -> bool:
        """Whether some tokens cannot be sampled, so that rollouts come from another distribution than the trainer's."""
        return self.top_p < 1 or self.top_k > 0

    def check(self) -> None:
        """Refuse values and combinations within this section, and a reward that does not exist. Raises ValueError."""
        self._check_sampling()
        self._check_loss()
        sources = {"--ref-load": self.ref_load, "--ref-load-hf": self.ref_load_hf}
        given = [f"{flag} {value}" for flag, value in sources.items() if value]
        refuse(len(given) > 1, f"{' and '.join(given)}: the reference policy has one source; leave one out")
        refuse(bool(given) and not self.kl_coeff,
               f"{' '.join(given)} with --kl-coeff 0, which needs no reference policy: set --kl-coeff, or leave it out")
        for name in ("kl_type", "kl_in"):
            value = getattr(self, name)
            refuse(value != getattr(RlConfig, name) and not self.kl_coeff, f"{flag_name(name)} {value} with --kl-coeff "
                   "0, which estimates no KL divergence: set --kl-coeff, or leave it out")
        self._check_importance()
        refuse_below(self, {"updates_per_rollout": 1, "completions_per_prompt": 1, "reward_threads": 1,
                            "max_refills": 0})
        refuse(self.max_refills > 0 and self.completions_per_prompt < 2,
               f"--max-refills {self.max_refills} with --completions-per-prompt 1: a single completion has no others "
               "whose reward could be the same; use at least 2")
        refuse(self.advantage == "rloo" and self.completions_per_prompt < 2,
               f"--advantage rloo with --completions-per-prompt {self.completions_per_prompt}: there are no others to "
               "compare with; use at least 2")
        refuse(self.max_gen_kl is not None and not is_least(self.max_gen_kl, 0),
               f"--max-gen-kl {self.max_gen_kl} is not a number from 0 on (0: no limit)")
        refuse_below(self, {"max_tokens_per_microbatch": 1, "eval_prompts": 0})
        refuse(not is_least(self.eval_temperature, 0),
               f"--eval-temperature {self.eval_temperature} is not a number from 0 on")
        _check_coldness("--eval-temperature", self.eval_temperature)
        registry.reward(self.reward)

    def _check_sampling(self) -> None:
        """Refuse rollouts whose log-probs cannot be compared with the trainer's."""
        refuse(not is_above(self.temperature, 0), f"--temperature {self.temperature} is not a number above 0: greedy "
               "rollouts of a prompt are all the same and have no log-probabilities")
        _check_coldness("--temperature", self.temperature)
        refuse(not 0 < self.top_p <= 1, f"--top-p {self.top_p} is not in (0, 1]")
        refuse(self.top_k < 0, f"--top-k {self.top_k} is below 0 (0: all tokens)")
        if self.truncates_sampling and self.importance_correction == "none":
            given = " and ".join(([f"--top-p {self.top_p}"] if self.top_p < 1 else [])
                                 + ([f"--top-k {self.top_k}"] if self.top_k > 0 else []))
            raise ValueError(
                f"{given} with --importance-correction none: rollouts then come from a truncated distribution, and the "
                "loss takes them for samples of the whole one. Use --top-p 1 --top-k 0, or --importance-correction "
                "token, icepop or sequence")
        if self.truncates_sampling and self.importance_correction != "token":
            # A weight is the trainer's probability divided by the engine's, which truncation increases by the factor
            # 1 / (share of probability that is kept). Weights that are below 1 only for this reason must not be cut.
            kind, low = self.importance_correction, self.importance_band[0]
            refuse(low > self.top_p, f"--top-p {self.top_p} with --importance-correction {kind} and --importance-low "
                   f"{low}: where engine and trainer agree, weights are from {self.top_p} to 1, and those below {low} "
                   f"are cut; use --importance-low {self.top_p} or less")
            refuse(self.top_k > 0 and self.importance_low is None,
                   f"--top-k {self.top_k} with --importance-correction {kind}: where engine and trainer agree, "
                   f"weights are the share of probability that {self.top_k} tokens have; set --importance-low below "
                   "what it may be")

    def _check_loss(self) -> None:
        (low, high), dual = self.clip_range, self.dual_clip_ratio
        if self.policy_loss == "cispo":
            refuse(not 0 <= low <= 1, f"--clip-ratio-low {low} is not in [0, 1]")
            refuse(dual is not None, f"--dual-clip-ratio {dual} is for --policy-loss ppo and gspo, not for cispo")
        else:
            refuse(not 0 <= low < 1, f"--clip-ratio-low {low} is not in [0, 1)")
        refuse(not is_least(high, 0), f"--clip-ratio-high {high} is not a number from 0 on")
        refuse(dual is not None and not is_above(dual, 1), f"--dual-clip-ratio {dual} is not a number above 1")
        for flag, value in (("--entropy-coeff", self.entropy_coeff), ("--kl-coeff", self.kl_coeff)):
            refuse(not is_least(value, 0), f"{flag} {value} is not a number from 0 on")
        length, normed = self.loss_norm_length, self.aggregation == "seq-mean-token-sum-norm"
        refuse(normed and length is None, "--loss-aggregation seq-mean-token-sum-norm needs --loss-norm-length")
        refuse(not normed and length is not None, f"--loss-norm-length {length} is for --loss-aggregation "
               f"seq-mean-token-sum-norm, not for {self.aggregation}")
        refuse(length is not None and length < 1, f"--loss-norm-length {length} is below 1")

    def _check_importance(self) -> None:
        kind = self.importance_correction
        # A weight of 1 means that engine and trainer agree, so it must never be cut.
        refuse(not is_least(self.importance_cap, 1),
               f"--importance-cap {self.importance_cap} is not a number from 1 on")
        refuse(self.importance_cap != RlConfig.importance_cap and kind != "token",
               f"--importance-cap {self.importance_cap} is for --importance-correction token, not for {kind}")
        for flag, value in (("--importance-low", self.importance_low), ("--importance-high", self.importance_high)):
            refuse(value is not None and kind not in ("icepop", "sequence"),
                   f"{flag} {value} is for --importance-correction icepop and sequence, not for {kind}")
        low, high = self.importance_band
        refuse(not 0 <= low <= 1, f"--importance-low {low} is not in [0, 1]")
        refuse(not is_least(high, 1), f"--importance-high {high} is not a number from 1 on")


def _check_coldness(flag: str, temperature: float) -> None:
    refuse(0 < temperature < MIN_TEMPERATURE, f"{flag} {temperature} is below {MIN_TEMPERATURE}, the least that vLLM "
           "samples at")


@dataclass(frozen=True)
class RolloutConfig:
    """Rollouts: the vLLM engine that completes prompts, and limits of its calls."""

    rollout_mode: Literal["sync", "one-step-off"] = "sync"
    """sync: the policy that is trained generates the completions. one-step-off: the policy before the update generates
    the next completions while the trainer updates."""
    rollout_seeds: bool = True
    """Give each prompt its own sampling seed, so that a resumed run samples the same completions."""
    max_completion_tokens: int = 512
    """Longest completion, its end token included; prompt and completion together are at most --seq-length."""
    engine_placement: Literal["separate", "colocated", "ray"] = "separate"
    """Where the engine runs: separate (on the first rank's host, on GPUs that no rank uses), colocated (on the
    trainer's own GPUs: those of the first rank's host, or with --ray-address those of all hosts), ray (where Ray
    places it)."""
    ray_address: str = ""
    """host:port of a Ray cluster, or auto for the one of this node. Without it --engine-placement ray starts Ray on
    this node. Colocated engines on several hosts need a cluster that has a node on each of them."""
    engine_gpus: str = ""
    """GPUs of separate engines, such as 4,5, in the first rank's numbering. Default: the GPUs after the trainer's."""
    engine_dp: int = 1
    """Replicas of the engine, between which prompts are divided."""
    engine_tp: int = 1
    """Tensor-parallel workers of a replica."""
    engine_pp: int = 1
    """Pipeline stages of a replica."""
    engine_nodes: int = 1
    """Number of nodes over which the workers of one replica are spread evenly. More than one needs a Ray cluster."""
    engine_restarts: int = 0
    """How often a run may start a new engine in place of one that has ended or hangs, in a refit as well. The new one
    gets all weights before it answers; one that fails to start counts, and the next is tried."""
    engine_ep: bool = False
    """Each worker of the engine holds whole experts (expert parallelism) instead of a slice of every expert."""
    engine_share_experts: bool = False
    """The replicas (--engine-dp) share one copy of the experts, whole ones with --engine-ep and slices otherwise, in
    place of a copy each. They then compute every step together (vLLM's data-parallel engine)."""
    engine_max_num_seqs: int = 64
    """Largest number of completions that a replica generates at a time."""
    engine_kv_cache_mib: int = 256
    """Memory of each engine worker for keys and values on the CPU, MiB."""
    engine_memory: float | None = None
    """Fraction of GPU memory that vLLM may use. Default: 0.85, and 0.6 with --engine-placement colocated."""
    engine_quantization: Literal["none", "fp8_per_block"] = "none"
    """fp8_per_block: the engine on GPUs quantises each refit's weights to FP8, with a scale for each block, as it loads
    them; routers, norms, embeddings, output layer, projectors and encoders without --encoder-fp8-format stay in
    bfloat16. With --fp8-recipe blockwise, blocks and scales are those of the trainer's products."""
    engine_kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """dtype of the keys and values that the engine keeps. auto: that of its weights; fp8: e4m3, half the memory of
    bfloat16."""
    engine_kv_scales: Literal["one", "calibrated"] = "one"
    """Scales of an FP8 cache of keys and values. one: no scaling; calibrated: from the largest key, value and query of
    each layer, which the trainer measures in every iteration and sends with the next refit."""
    engine_enforce_eager: bool = False
    """Run the engine on GPUs without CUDA graphs and compilation. It starts faster and generates more slowly."""
    engine_env: str = ""
    """Names of further environment variables of the first rank that every process of a Ray engine gets, such as
    UCX_TLS,MY_PATH. Those of vLLM, NCCL, Hugging Face and some others are always passed."""
    engine_start_timeout_s: float = 600.0
    """Seconds that the engine may take to start."""
    rollout_timeout_s: float = 600.0
    """Seconds that any call of the engine may take, including the completions of a step."""
    refit_timeout_s: float = 300.0
    """Time limit in seconds for each wait while the engine receives the trainer's weights."""
    refit_delta: bool = False
    """Send only the blocks of weights that have changed since the last refit. Checksums prove that the engine has the
    others. Layers that vLLM loads itself (all of an engine that quantises, and linear layers on CPUs) are proved by
    verified refits only (--refit-verify-interval)."""
    refit_verify_interval: int = 25
    """Verify the first refit of a run and every n-th after it; 0: none. A verification compares checksums of all
    weights, and log-probs of engine and trainer for the same tokens, with the real weights and with scrambled ones."""

    @property
    def num_engine_workers(self) -> int:
        """Number of workers of all replicas. Each needs a GPU."""
        return self.engine_dp * self.engine_tp * self.engine_pp

    @property
    def sizes(self) -> str:
        """The flags that say how many workers there are, for errors."""
        return f"--engine-dp {self.engine_dp} --engine-tp {self.engine_tp} --engine-pp {self.engine_pp}"

    @property
    def uses_ray(self) -> bool:
        """Whether Ray starts the engine's processes, in place of the first rank."""
        return self.engine_placement == "ray" or bool(self.ray_address)

    @property
    def gpu_numbers(self) -> tuple[int, ...]:
        """GPU numbers in `--engine-gpus`. Raises ValueError for anything else."""
        numbers = [each.strip() for each in self.engine_gpus.split(",")] if self.engine_gpus else []
        if not all(each.isdecimal() for each in numbers):
            raise ValueError(f"--engine-gpus {self.engine_gpus}: must be numbers with commas between them, such as 4,5")
        return tuple(map(int, numbers))

    def check(self) -> None:
        """Refuse values and combinations within this section. Raises ValueError."""
        refuse_below(self, {"max_completion_tokens": 1, "engine_dp": 1, "engine_tp": 1, "engine_pp": 1,
                            "engine_nodes": 1, "engine_restarts": 0, "engine_max_num_seqs": 1,
                            "engine_kv_cache_mib": 1})
        refuse(self.refit_verify_interval < 0,
               f"--refit-verify-interval {self.refit_verify_interval} is below 0 (0: verify no refit)")
        for name in ("engine_start_timeout_s", "rollout_timeout_s", "refit_timeout_s"):
            value = vars(self)[name]
            refuse(not 0 < value <= MAX_TIMEOUT_S,
                   f"{flag_name(name)} {value} is not above 0 and at most {MAX_TIMEOUT_S:g} (a week)")
        self._check_placement()
        self._check_nodes()
        refuse(self.engine_kv_scales == "calibrated" and self.engine_kv_cache_dtype != "fp8",
               f"--engine-kv-scales calibrated with --engine-kv-cache-dtype {self.engine_kv_cache_dtype}: only an FP8 "
               "cache has scales; use --engine-kv-cache-dtype fp8, or leave it out")
        refuse(self.rollout_timeout_s < self.refit_timeout_s,
               f"--rollout-timeout-s {self.rollout_timeout_s}, which limits every call of the engine, is below "
               f"--refit-timeout-s {self.refit_timeout_s}")

    def _check_placement(self) -> None:
        placement = self.engine_placement
        refuse(bool(self.ray_address) and placement == "separate",
               f"--ray-address {self.ray_address} is for --engine-placement ray and colocated, not for {placement}")
        refuse(self.ray_address.startswith("ray://"),
               f"--ray-address {self.ray_address}: Ray Client is not supported; start Ray on this node as one of the "
               "cluster's and use auto, or host:port of its GCS")
        refuse(self.ray_address not in ("", "auto") and not re.fullmatch(r".+:\d+", self.ray_address),
               f"--ray-address {self.ray_address} is neither host:port of a Ray cluster nor auto")
        refuse(self.engine_memory is not None and not 0 < self.engine_memory <= 1,
               f"--engine-memory {self.engine_memory} is not above 0 and at most 1")
        refuse(bool(self.engine_gpus) and placement != "separate",
               f"--engine-gpus {self.engine_gpus} is for --engine-placement separate, not for {placement}")
        numbers = self.gpu_numbers
        refuse(len(set(numbers)) != len(numbers), f"--engine-gpus {self.engine_gpus} has a GPU twice")
        refuse(bool(self.engine_gpus) and len(numbers) != self.num_engine_workers,
               f"--engine-gpus {self.engine_gpus} has {len(numbers)}, and {self.sizes} need {self.num_engine_workers}, "
               "one for each worker")

    def _check_nodes(self) -> None:
        nodes, workers = self.engine_nodes, self.engine_tp * self.engine_pp
        refuse(nodes > 1 and not self.ray_address,
               f"--engine-nodes {nodes} needs a Ray cluster: give --ray-address, and --engine-placement ray or "
               "colocated")
        refuse(workers % nodes != 0, f"--engine-nodes {nodes} does not divide the {workers} workers of a replica "
               f"(--engine-tp {self.engine_tp} * --engine-pp {self.engine_pp})")
        refuse(self.refit_delta and self.engine_placement == "colocated",
               "--refit-delta with --engine-placement colocated: the engine loses its weights when it sleeps, so that "
               "each refit has to send all of them; leave it out")
        refuse(bool(self.engine_env) and not self.uses_ray,
               f"--engine-env {self.engine_env} is for engines that Ray starts (--engine-placement ray, or "
               "--ray-address): others are children of the first rank and get its whole environment")
        refuse("CUDA_VISIBLE_DEVICES" in self.engine_env.replace(" ", "").split(","),
               f"--engine-env {self.engine_env}: the GPUs of each process of the engine are chosen by Ray, or by the "
               "trainer's ranks; leave CUDA_VISIBLE_DEVICES out")
        refuse(self.engine_share_experts and self.engine_dp == 1,
               "--engine-share-experts with --engine-dp 1: there is no other replica to share the experts with")
        refuse(self.engine_share_experts and self.engine_pp > 1,
               f"--engine-share-experts with --engine-pp {self.engine_pp} is not supported: vLLM's steps of a replica "
               "without prompts have not been tried with pipeline stages; use --engine-tp and --engine-dp")
        refuse(self.engine_share_experts and nodes > 1,
               f"--engine-share-experts with --engine-nodes {nodes} is not supported: give each replica the workers of "
               "one node (--engine-nodes 1), and more replicas (--engine-dp)")
        restarts = self.engine_restarts
        refuse(restarts > 0 and self.engine_placement == "colocated",
               f"--engine-restarts {restarts} with --engine-placement colocated is not supported yet: a lost engine "
               "may hold the trainer's GPUs; use --engine-restarts 0 and resume the run from its last checkpoint")
        refuse(restarts > 0 and self.rollout_mode != "sync",
               f"--engine-restarts {restarts} with --rollout-mode {self.rollout_mode} is not supported yet: the lost "
               "completions came from weights that the trainer no longer has; use --rollout-mode sync")
