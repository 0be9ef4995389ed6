"""Whether engine and trainer compute with the same weights after a refit: log-probs of the same tokens, compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from megatron.core.utils import get_model_config

from mimo.checkpoint.agree import from_first_rank, gather, raise_together
from mimo.config.rl_run import RlRunConfig
from mimo.observe.errors import ReportedElsewhereError
from mimo.protocols import LANGUAGE
from mimo.refit.meeting import RefitError
from mimo.refit.probe import Expected, ProbeReport, ScoresPrompts, compare_logprobs
from mimo.refit.scramble import rounded, scrambled
from mimo.rl.engine import engine_dtype
from mimo.rl.images import ImageTokens, as_request
from mimo.rl.policy import PolicyMicrobatch, PolicyTrainer
from mimo.rl.prompts import Prompt, PromptSet
from mimo.rl.rollouts import Completion, prompt_length

# At least so many sequences and tokens, and tokens for each expert of a layer if all got as many.
NUM_SEQUENCES = 8
NUM_TOKENS = 1024
TOKENS_PER_EXPERT = 32
# Random tokens behind each prompt, at most: in short sequences attention is no mean over many tokens, and shows more.
TAIL_TOKENS = 24
# Bits of a mantissa to whose last bit the two sides round: Transformer Engine and the kernels of mamba_ssm round
# factors to TF32 in float32 on GPUs. FP8 has 3, but its values are not rounded as often as bfloat16's.
MANTISSA_BITS = {"float32": 23, "bfloat16": 7}
TF32_MANTISSA_BITS = 10
FP8_MANTISSA_BITS = 4


class RefitProbe:
    """Compares log-probs of training prompts, each followed by random tokens. Methods are collective over the world.

    Random tokens are routed to all experts and use tokens that prompts do not have.

    Args:
        config: the run.
        policy: computes the trainer's side, as it does in updates.
        prompts: of training, on the first rank; None on the others.
        client: the engine, on the first rank.
        vocab_size: number of tokens of the model.

    Attributes:
        reports: figures of the last comparison that passed, by what was compared, on the first rank.
    """

    def __init__(self, config: RlRunConfig, policy: PolicyTrainer, prompts: PromptSet | None,
                 client: ScoresPrompts | None, vocab_size: int) -> None:
        self._policy, self._client, self._grids = policy, client, policy.parts.grids
        self._mantissa_bits = mantissa_bits(config, policy.parts.platform.name)
        num_tokens = max(gather(self._grids, max(NUM_TOKENS, self._tokens_for_experts())))
        # Each replica of the engine gets one sequence at least, and each data-parallel rank as many as the others.
        dp = self._grids.layout.language.dp
        count = -(-max(NUM_SEQUENCES, config.rollout.engine_dp) // dp) * dp
        drawn: list[tuple[Prompt, Completion]] = []
        error = None
        if prompts is not None:
            sequences = self._with_tails(prompts, config.train.seq_length, vocab_size)
            try:
                while len(drawn) < count or sum(each.length for _, each in drawn) < num_tokens or len(drawn) % dp:
                    drawn.append(next(sequences))
            except ValueError as problem:
                error = str(problem)
        raise_together(self._grids, error)
        self._requests = [as_request(prompt) | {"prompt_token_ids": [*prompt.token_ids, *sequence.token_ids]}
                          for prompt, sequence in drawn]
        self._sequences: list[Completion] = from_first_rank(self._grids, [sequence for _, sequence in drawn])
        self.reports: dict[str, ProbeReport] = {}

    def expect(self) -> Expected:
        """Compute what an engine with the trainer's present weights should answer. Collective."""
        logprobs = self._logprobs()
        with rounded(self._policy.parts.built, self._grids, self._mantissa_bits):
            return Expected(logprobs, self._logprobs())

    @contextmanager
    def scrambled(self) -> Iterator[Expected]:
        """Scramble the trainer's weights while the block runs; gives what an engine with these should answer."""
        with scrambled(self._policy.parts.built, self._grids):
            yield self.expect()

    def compare(self, expected: Expected, weights: str) -> None:
        """Ask the engine, on the first rank.

        Args:
            expected: what it should answer with the weights that it has.
            weights: what these are, for messages.

        Raises:
            RefitError: on the first rank: the engine did not answer, or its log-probs are further off than rounding
                explains.
            ReportedElsewhereError: on the other ranks then.
        """
        error = None
        if self._client is not None:
            try:
                self.reports[weights] = compare_logprobs(self._client, self._requests, expected,
                                                         [each.key for each in self._sequences])
            except (RefitError, ValueError) as problem:
                error = RefitError(f"--refit-verify-interval: after a refit of {weights}, {problem}")
        failed = from_first_rank(self._grids, error is not None)
        if error is not None:
            raise error
        if failed:
            raise ReportedElsewhereError("rank 0 reports what is wrong")

    def _tokens_for_experts(self) -> int:
        """Tokens with which each expert of a layer gets `TOKENS_PER_EXPERT` if all get as many."""
        if LANGUAGE not in self._grids.collections:
            return 0
        model = get_model_config(self._policy.parts.built.model)
        return -(-TOKENS_PER_EXPERT * model.num_moe_experts // model.moe_router_topk) if model.num_moe_experts else 0

    def _with_tails(self, prompts: PromptSet, seq_length: int, vocab_size: int) -> Iterator[tuple[Prompt, Completion]]:
        """Prompts of training, and each as a sequence that goes on with random tokens."""
        images: ImageTokens | None = self._policy.images
        placeholders = set() if images is None else set(images.modules.values())
        words = np.array([token for token in range(vocab_size) if token not in placeholders])
        random = np.random.default_rng(0)
        without_room = 0
        for index in itertools.count():
            prompt = prompts.prompt(index)
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

    def _logprobs(self) -> list[list[float | None]]:
        """For each sequence, of each token from the second on; None for those of images. On every rank."""
        microbatches = self._policy.microbatches(self._sequences)
        values = self._policy.old_log_probs(microbatches, temperature=1.0)
        own: dict[int, list[float | None]] = {}
        if self._policy.parts.counts_losses:
            for batch, found in zip(microbatches, values, strict=True):
                own |= self._by_sequence(batch, found.tolist())
        by_sequence = {index: row for each in gather(self._grids, own) for index, row in each.items()}
        return [by_sequence[index] for index in range(len(self._sequences))]

    def _by_sequence(self, batch: PolicyMicrobatch, values: list[float]) -> dict[int, list[float | None]]:
        images = set() if self._policy.images is None else set(self._policy.images.modules.values())
        rows: dict[int, list[float | None]] = {member: [] for member in batch.members}
        numbers = batch.sampled.sequence_ids.tolist()
        for row, label, value in zip(numbers, batch.labels[0].tolist(), values, strict=True):
            if label >= 0:
                rows[batch.members[row]].append(None if label in images else value)
        return rows


def mantissa_bits(config: RlRunConfig, platform: str) -> int:
    """Bits to whose last one an engine and a trainer on a platform round."""
    if config.rollout.engine_quantization != "none":
        return FP8_MANTISSA_BITS
    dtype = engine_dtype(config)
    return TF32_MANTISSA_BITS if (dtype, platform) == ("float32", "cuda") else MANTISSA_BITS[dtype]
