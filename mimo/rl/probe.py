"""Verifies after a refit that engine and trainer compute with the same weights: compares log-probs of the same tokens.

Two correct sides differ by rounding, and by how much depends on the model. The trainer measures it: it computes the
log-probs a second time with weights that are rounded differently. The engine may be a few times as far off as that.

Both sides may have scrambled weights during the comparison. A refit that leaves out a tensor, or exchanges two, hardly
shows in the log-probs of a policy that has moved little since the last refit, or whose tensors are alike. Scrambled
weights have nothing in common with the real ones: the sign of about half of the elements is changed, and matrices of an
untrained model are scaled up so that each layer contributes. Every tensor that an engine misses or confuses then
changes its log-probs.

Two further scalings make rounding noise small compared with the effect of a fault. Embeddings become larger than what
the layers add to them, so that a layer's rounding errors hardly change what the next layers compute. Routers are scaled
so that few tokens are undecided between two experts.

Scrambled and rounded weights are restored bit by bit.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.utils import get_model_config

from mimo.comm import broadcast_object, broadcast_outcome, gather, shared_errors
from mimo.config.rl_run import RlRunConfig
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel, named_modules_of
from mimo.protocols import LANGUAGE
from mimo.refit.rendezvous import RefitError
from mimo.rl.images import ImageTokens, as_request
from mimo.rl.kv_scales import KvScales
from mimo.rl.launch_engine import engine_dtype
from mimo.rl.policy import PolicyTrainer
from mimo.rl.prompts import BadPromptError, Prompt, PromptSet, SkippingPromptSet
from mimo.rl.rollouts import Completion, prompt_length
from mimo.rollout.replicas import RolloutClient
from mimo.weights.match import ModelPiece, module_pieces

# A token's difference counts as at most this many nats in k3, so that single tokens do not decide it.
MAX_DIFFERENCE = 1.0
# Log-probs are float32 on both sides, so differences below these mean nothing, however small the noise is.
MEAN_FLOOR = 2e-5
KL_FLOOR = 2e-9

LogProbs = Sequence[Sequence[float | None]]
"""For each prompt, the log-prob of every token from the second on; None for a token that is not compared."""


@dataclass(frozen=True)
class Expected:
    """The trainer's side of a comparison.

    Attributes:
        logprobs: with the weights that the engine should have.
        rounded: the same with weights that are rounded differently, see `mimo.rl.probe.rounded`.
        noise_factor: the engine may differ by this many times the rounding noise on average, and by the square of it
            times the noise in k3.
        kv_scales: scales for an FP8 cache of these tokens, see `mimo.rl.kv_scales`; empty without them.
    """

    logprobs: LogProbs
    rounded: LogProbs
    noise_factor: float
    kv_scales: KvScales = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeReport:
    """Result of a comparison.

    Attributes:
        mean_difference: mean over the tokens of the absolute difference of the log-probs, in nats.
        kl: mean over the tokens of k3 = exp(d) - 1 - d with d = log p_trainer - log p_engine (J. Schulman,
            "Approximating KL divergence", 2020), d being limited to +-1.
        mean_limit, kl_limit: the most that rounding explains.
        num_tokens: tokens that were compared.
        worst: prompt and token (from 0) with the largest difference.
    """

    mean_difference: float
    kl: float
    mean_limit: float
    kl_limit: float
    num_tokens: int
    worst: tuple[int, int]


def compare_logprobs(engine: RolloutClient, prompts: Sequence[dict[str, Any]], expected: Expected,
                     names: Sequence[str] = ()) -> ProbeReport:
    """Ask an engine for the log-probs of prompts and compare them with the trainer's.

    Requests are in vLLM's form. Without `names` of the prompts, messages use their numbers.

    Raises:
        ValueError: the two sides do not have the same tokens, or none to compare.
        RefitError: the mean difference or k3 is larger than rounding explains, or a log-prob is not finite.
    """
    answers = engine.prompt_logprobs(prompts)
    lengths = [len(own) for own in expected.logprobs]
    if [len(own) for own in answers] != lengths:
        raise ValueError(f"the trainer's log-probs are of {lengths} tokens, the engine's of "
                         f"{[len(own) for own in answers]}")
    found = _differences(answers, expected.logprobs)
    if not found:
        raise ValueError(f"{len(prompts)} prompts have no token whose log-probs could be compared")

    def described(place: tuple[int, int]) -> str:
        prompt, token = place
        return (f"token {token} of prompt {names[prompt] if names else prompt} has log-prob "
                f"{answers[prompt][token - 1]:.6g} in the engine and {expected.logprobs[prompt][token - 1]:.6g} in the "
                "trainer")

    broken = [place for place, difference in found.items() if not math.isfinite(difference)]
    if broken:
        raise RefitError(f"{described(broken[0])}; {len(broken)} of {len(found)} tokens are like that")
    # Weights that are rounded differently show how far off two correct sides are.
    mean, kl = _figures(found)
    noise_mean, noise_kl = _figures(_differences(expected.rounded, expected.logprobs))
    factor = expected.noise_factor
    report = ProbeReport(mean, kl, factor * noise_mean + MEAN_FLOOR, factor ** 2 * noise_kl + KL_FLOOR, len(found),
                         max(found, key=lambda place: abs(found[place])))
    if mean > report.mean_limit or kl > report.kl_limit:
        raise RefitError(
            f"engine and trainer do not compute with the same weights: over {len(found)} tokens their log-probs differ "
            f"by {mean:.3g} nats on average, and k3 is {kl:.3g}; rounding explains {report.mean_limit:.3g} and "
            f"{report.kl_limit:.3g} at most. The largest difference: {described(report.worst)}")
    return report


def _differences(theirs: LogProbs, ours: LogProbs) -> dict[tuple[int, int], float]:
    """Return our log-prob minus theirs, by prompt and token, where both exist."""
    return {(prompt, token + 1): our - their
            for prompt, (answer, own) in enumerate(zip(theirs, ours, strict=True))
            for token, (their, our) in enumerate(zip(answer, own, strict=True))
            if our is not None and their is not None}


def _figures(differences: dict[tuple[int, int], float]) -> tuple[float, float]:
    """Return the mean absolute difference and the mean k3."""
    values = list(differences.values())
    limited = [max(-MAX_DIFFERENCE, min(MAX_DIFFERENCE, each)) for each in values]
    return sum(map(abs, values)) / len(values), sum(math.expm1(each) - each for each in limited) / len(values)


# Least number of sequences, of tokens, and of tokens for each expert of a layer if routing were even.
NUM_SEQUENCES = 8
NUM_TOKENS = 1024
TOKENS_PER_EXPERT = 32
# Most random tokens behind each prompt. Short sequences show more, because attention averages over fewer tokens.
TAIL_TOKENS = 24


@dataclass(frozen=True)
class Rounding:
    """Rounding of both sides.

    Attributes:
        mantissa_bits: bits of the mantissa to which both sides round.
        noise_factor: see `Expected`, for the weights of the model.
        scrambled_noise_factor: for scrambled weights. They are alike in all models, so their noise is known better and
            the limits are tighter. With the models of scripts/bench/refit_verify.py on a GPU, correct refits reached
            0.43 of the limit in bfloat16 and 0.74 with an FP8 engine; single faults reached at least 4.0 and 1.5.
    """

    mantissa_bits: int
    noise_factor: float
    scrambled_noise_factor: float


# Transformer Engine and the kernels of mamba_ssm round factors to TF32 in float32 on GPUs. FP8 has 3 bits, but its
# values are not rounded as often as bfloat16's.
ROUNDING = {"float32": Rounding(23, 2.0, 2.0), "tf32": Rounding(10, 2.0, 2.0), "bfloat16": Rounding(7, 2.0, 1.5),
            "fp8": Rounding(4, 2.0, 0.7)}


class RefitProbe:
    """Compares log-probs of training prompts, each followed by random tokens. Methods are collective over the world.

    Random tokens reach all experts, and they include tokens that prompts never contain. `prompts` (training prompts)
    and `client` are None on ranks other than the first.

    Attributes:
        reports: results of the last comparison that passed, by what was compared, on the first rank.
    """

    def __init__(self, config: RlRunConfig, policy: PolicyTrainer, prompts: PromptSet | None,
                 client: RolloutClient | None, vocab_size: int) -> None:
        self._policy, self._client, self._grids = policy, client, policy.parts.grids
        self._rounding = rounding(config, policy.parts.platform.name)
        for_experts = 0
        if LANGUAGE in self._grids.collections:
            model = get_model_config(policy.parts.built.model)
            if model.num_moe_experts:
                for_experts = -(-TOKENS_PER_EXPERT * model.num_moe_experts // model.moe_router_topk)
        num_tokens = max(gather(self._grids, max(NUM_TOKENS, for_experts)))
        # Each replica of the engine gets at least one sequence, and all data-parallel ranks get equally many.
        dp = self._grids.layout.language.dp
        count = -(-max(NUM_SEQUENCES, config.rollout.engine_dp) // dp) * dp
        drawn: list[tuple[Prompt, Completion]] = []
        with shared_errors(self._grids):
            if prompts is not None:
                sequences = self._with_tails(prompts, config.train.seq_length, vocab_size)
                while len(drawn) < count or sum(each.length for _, each in drawn) < num_tokens or len(drawn) % dp:
                    drawn.append(next(sequences))
        self._requests = [as_request(prompt, sequence.token_ids) for prompt, sequence in drawn]
        self._sequences: list[Completion] = broadcast_object(self._grids, [sequence for _, sequence in drawn])
        self.reports: dict[str, ProbeReport] = {}

    def expect(self, noise_factor: float | None = None) -> Expected:
        """Compute what an engine with the trainer's present weights should answer. Collective.

        `noise_factor` replaces that of the model's own weights.
        """
        logprobs, scales = self._logprobs()
        with rounded(self._policy.parts.built, self._grids, self._rounding.mantissa_bits):
            return Expected(logprobs, self._logprobs()[0],
                            self._rounding.noise_factor if noise_factor is None else noise_factor, scales)

    def measure(self) -> KvScales:
        """Return the scales for an FP8 cache of the sequences with the trainer's weights. Collective."""
        return self._logprobs()[1]

    @contextmanager
    def scrambled(self) -> Iterator[Expected]:
        """Scramble the trainer's weights inside the context, and give what an engine with them should answer."""
        with scrambled(self._policy.parts.built, self._grids):
            yield self.expect(self._rounding.scrambled_noise_factor)

    def compare(self, expected: Expected, weights: str) -> None:
        """Compare the engine's log-probs with the expected ones. The first rank asks the engine.

        `weights` names the weights that the engine should have, for messages.

        Raises:
            RefitError: the engine did not answer, or its log-probs are further off than rounding explains; raised on
                the first rank.
            ReportedElsewhereError: the same, on the other ranks.
        """
        error = None
        if self._client is not None:
            try:
                self.reports[weights] = compare_logprobs(self._client, self._requests, expected,
                                                         [each.key for each in self._sequences])
            except (RefitError, ValueError) as problem:
                error = RefitError(f"--refit-verify-interval: after a refit of {weights}, {problem}")
                error.__cause__ = problem
        broadcast_outcome(self._grids, None, error)

    def _with_tails(self, prompts: PromptSet, seq_length: int, vocab_size: int) -> Iterator[tuple[Prompt, Completion]]:
        """Yield training prompts, each with a sequence that continues it with random tokens."""
        images: ImageTokens | None = self._policy.images
        placeholders = set() if images is None else images.ids
        words = np.array([token for token in range(vocab_size) if token not in placeholders])
        random = np.random.default_rng(0)
        without_room, bad = 0, set[str]()
        most_bad = prompts.max_bad_samples if isinstance(prompts, SkippingPromptSet) else 0
        for index in itertools.count():
            try:
                prompt = prompts.prompt(index)
                as_request(prompt)
            except BadPromptError as error:  # the run reports it when its turn comes
                bad.add(error.key)
                if len(bad) > most_bad:
                    raise
                continue
            # The engine's model length is --seq-length, and it samples one token after those that it scores.
            room = seq_length - 1 - prompt_length(prompt, images)
            if room < 1:
                without_room += 1
                if without_room > NUM_TOKENS:
                    raise ValueError(f"--seq-length {seq_length} leaves no room behind the prompts for a token of "
                                     "--refit-verify-interval: make it one longer, or set --refit-verify-interval 0")
                continue
            tail = tuple(random.choice(words, min(room, TAIL_TOKENS)).tolist())
            num_image_tokens = 0 if images is None else images.count(prompt)
            yield prompt, Completion(prompt.key, index, prompt.token_ids, tail, (0.0,) * len(tail), "length", 0.0,
                                     index, prompt.image_sizes, num_image_tokens)

    def _logprobs(self) -> tuple[list[list[float | None]], KvScales]:
        """Compute log-probs of each sequence from its second token on, None for image tokens. Collective.

        The scales for an FP8 cache come with them, see `PolicyTrainer.measured_log_probs`.
        """
        microbatches = self._policy.microbatches(self._sequences)
        values, scales = self._policy.measured_log_probs(microbatches, temperature=1.0)
        own: dict[int, list[float | None]] = {}
        if self._policy.parts.counts_losses:
            images = set() if self._policy.images is None else self._policy.images.ids
            for batch, found in zip(microbatches, values, strict=True):
                own |= {member: [] for member in batch.members}
                whole = (self._policy.whole_row(batch, each).tolist()
                         for each in (batch.sampled.sequence_ids, batch.labels[0], found))
                for row, label, value in zip(*whole, strict=True):
                    if label >= 0:  # not the end of a sequence, and no padding
                        own[batch.members[row]].append(None if label in images else value)
        by_sequence = {index: row for each in gather(self._grids, own) for index, row in each.items()}
        return [by_sequence[index] for index in range(len(self._sequences))], scales


def rounding(config: RlRunConfig, platform: str) -> Rounding:
    """Select the rounding of a run's engine and trainer on a platform."""
    fp8 = {config.model.fp8_format, config.model.encoder_fp8_format, config.rollout.engine_quantization}
    if fp8 != {"none"} or config.rollout.engine_kv_cache_dtype == "fp8":
        return ROUNDING["fp8"]
    dtype = engine_dtype(config)
    return ROUNDING["tf32" if (dtype, platform) == ("float32", "cuda") else dtype]


# Integer dtype of the same size, and number of mantissa bits. The exponent is above them, the sign is the highest bit.
FORMATS = {torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10), torch.float32: (torch.int32, 23),
           torch.float64: (torch.int64, 52)}
# dtypes whose exponents (8 bits) have room for scaling, and the largest power of two to scale by.
SCALED_DTYPES = frozenset({torch.bfloat16, torch.float32})
EXPONENT_BITS = 8
MAX_POWER = 20
# Additional powers of two, which bring elements of an embedding, and router logits, to a size of 4 to 8.
EMBEDDING_POWER = 2
ROUTER_POWER = 2
# Number of elements that are changed at a time, so that masks of a large embedding take little memory.
BLOCK_ELEMENTS = 1 << 24


@contextmanager
def scrambled(built: BuiltModel, grids: Grids) -> Iterator[None]:
    """Context with scrambled weights, for refits and forward passes but no step. Collective.

    Ranks that hold the same part of a tensor scramble it alike: signs depend on a tensor's global name and place. The
    weights must not be offloaded.
    """
    with torch.no_grad():
        parts = _parts(built, grids)
        # Whether the output layer uses the weights of the embedding; every stage says so.
        is_tied = any(isinstance(module, LanguageModule) and module.share_embeddings_and_output_weights
                      for module in built.model.modules())
        powers = _powers(parts, is_tied)
        for part, power in zip(parts, powers, strict=True):
            _scale(part, power)
            _flip(part, "signs", part.sign_bit)
    try:
        yield
    finally:
        with torch.no_grad():
            for part, power in zip(parts, powers, strict=True):
                _flip(part, "signs", part.sign_bit)
                _scale(part, -power)


@contextmanager
def rounded(built: BuiltModel, grids: Grids, mantissa_bits: int) -> Iterator[None]:
    """Context in which about half of the weights differ in their last bit. Collective like `scrambled`.

    It is the last bit of a mantissa of `mantissa_bits`, such as 7 for bfloat16. The weights must not be offloaded.
    """
    with torch.no_grad():
        parts = _parts(built, grids)
        for part in parts:
            _flip(part, "rounding", max(0, part.mantissa_bits - mantissa_bits))
    try:
        yield
    finally:
        with torch.no_grad():
            for part in parts:
                _flip(part, "rounding", max(0, part.mantissa_bits - mantissa_bits))


@dataclass(frozen=True)
class _Part:
    """A part of one tensor on this rank.

    Attributes:
        name: name of the tensor, with its module.
        piece: place of the part in the tensor, and its values.
        words: the same memory as integers.
        mantissa_bits: number of mantissa bits of a value.
    """

    name: str
    piece: ModelPiece
    words: torch.Tensor
    mantissa_bits: int

    @property
    def sign_bit(self) -> int:
        return 8 * self.words.element_size() - 1


def _parts(built: BuiltModel, grids: Grids) -> list[_Part]:
    """Return every floating-point part of this rank's tensors, without scalars. Shared memory is listed once."""
    built.finish_gathers("a refit")
    found: dict[tuple[int, tuple[int, ...]], _Part] = {}
    for module, owner in named_modules_of(built.model):
        for piece in module_pieces(owner, grids.collections[module]):
            tensor = piece.tensor
            if tensor.dtype not in FORMATS or not tensor.numel() or not tensor.ndim:
                continue
            integers, mantissa_bits = FORMATS[tensor.dtype]
            # A tied embedding occurs twice. Changing its signs twice would restore them.
            found.setdefault((tensor.data_ptr(), tuple(tensor.shape)),
                             _Part(f"{module} {piece.name}", piece, tensor.view(integers), mantissa_bits))
    return list(found.values())


def _powers(parts: list[_Part], is_tied: bool) -> list[int]:
    """Return the power of two by which each part is scaled up so that inputs of size 1 give outputs of size 1 to 2.

    The power is 0 for parts that are not matrices. A tied embedding is scaled as an output layer.
    """
    matrices = [part for part in parts if part.piece.tensor.ndim > 1 and part.piece.tensor.dtype in SCALED_DTYPES]
    if not matrices:
        return [0] * len(parts)
    # Ranks that hold the same part find the same norm.
    norms = torch.stack([torch.linalg.vector_norm(part.piece.tensor, dtype=torch.float32) for part in matrices])
    powers = {}
    for part, norm in zip(matrices, norms.tolist(), strict=True):
        gain = norm / math.sqrt(part.piece.tensor.numel())
        further = 0
        if part.name.endswith("word_embeddings.weight") and not is_tied:
            further = EMBEDDING_POWER  # The elements of a row are the outputs.
        else:
            gain *= math.sqrt(math.prod(part.piece.shape[1:]))  # size of an output of the whole tensor
            if part.name.endswith("router.weight"):
                further = ROUTER_POWER
        if gain > 0 and math.isfinite(gain):
            powers[id(part)] = min(MAX_POWER, max(0, -math.frexp(gain)[1] + 1 + further))
    return [powers.get(id(part), 0) for part in parts]


def _scale(part: _Part, power: int) -> None:
    """Add to the exponents, which can be undone exactly. Zeros and subnormal numbers stay as they are."""
    for words, _ in _blocks(part) if power else ():
        exponents = words.bitwise_right_shift(part.mantissa_bits).bitwise_and_((1 << EXPONENT_BITS) - 1)
        words.add_(exponents.ne(0), alpha=power << part.mantissa_bits)


def _flip(part: _Part, purpose: str, bit: int) -> None:
    """Flip a bit of each element for which the random bits of its row, column and so on have an odd sum."""
    seed = hashlib.sha256(f"{purpose} {part.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
    # There is one random bit for each index on each axis of the whole tensor. This rank may hold a part of the tensor.
    axes = [torch.randint(0, 2, (size,), generator=generator, dtype=part.words.dtype)[held].to(part.words.device)
            for size, held in zip(part.piece.shape, part.piece.box.slices, strict=True)]
    # The integers are signed, so the value of the sign bit is negative.
    size = 8 * part.words.element_size()
    value = -(1 << bit) if bit == size - 1 else 1 << bit
    for words, rows in _blocks(part):
        mask = axes[0][rows].view(-1, *(1,) * (words.ndim - 1)).clone()
        for number, axis in enumerate(axes[1:], start=1):
            mask = mask.bitwise_xor(axis.view(-1, *(1,) * (words.ndim - 1 - number)))
        words.bitwise_xor_(mask.mul_(value))


def _blocks(part: _Part) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield the part's integers in blocks of rows, and the numbers of these rows."""
    words = part.words
    rows = max(1, BLOCK_ELEMENTS * words.shape[0] // words.numel())
    for first in range(0, words.shape[0], rows):
        held = slice(first, first + rows)
        yield words[held], held
