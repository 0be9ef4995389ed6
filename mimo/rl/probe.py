"""Whether engine and trainer mean the same by the weights of a refit: log-probs of the same prompts on both sides."""

from __future__ import annotations

from mimo.checkpoint.agree import from_first_rank, gather
from mimo.config.rl_run import RlRunConfig
from mimo.observe.errors import ReportedElsewhereError
from mimo.refit.meeting import RefitError
from mimo.refit.probe import ScoresPrompts, compare_logprobs
from mimo.rl.engine import engine_dtype
from mimo.rl.images import as_request
from mimo.rl.policy import PolicyMicrobatch, PolicyTrainer
from mimo.rl.prompts import PromptSet
from mimo.rl.rollouts import Completion

NUM_PROMPTS = 8
# Nats by which the log-probs of a token may differ. In bfloat16 kernels round differently: an unlikely token, or one
# that a router therefore sends to another expert, is some way off with the same weights.
TOLERANCES = {"float32": 1e-3, "bfloat16": 1.0}
# In float32 on a GPU: Transformer Engine and the kernels of mamba_ssm round factors to TF32, engines do not.
TF32_TOLERANCE = 0.1


def tolerance_of(dtype: str, platform: str) -> float:
    """Nats by which a token's log-probs may differ between an engine of that dtype and a trainer on that platform."""
    return TF32_TOLERANCE if (dtype, platform) == ("float32", "cuda") else TOLERANCES[dtype]


class RefitProbe:
    """Compares the first prompts of training, after every refit. Collective over the trainer's world, as its methods.

    Args:
        config: the run.
        policy: computes the trainer's side, as it does in updates.
        prompts: of training, on the first rank; None on the others.
        client: the engine, on the first rank.
    """

    def __init__(self, config: RlRunConfig, policy: PolicyTrainer, prompts: PromptSet | None,
                 client: ScoresPrompts | None) -> None:
        self._policy, self._client, self._grids = policy, client, policy.parts.grids
        self._tolerance = tolerance_of(engine_dtype(config), policy.parts.platform.name)
        # Each replica of the engine gets one at least, and each data-parallel rank as many as the others.
        dp = self._grids.layout.language.dp
        count = -(-max(NUM_PROMPTS, config.rollout.engine_dp) // dp) * dp
        chosen = [] if prompts is None else [prompts.prompt(index) for index in range(count)]
        self._requests = [as_request(prompt) for prompt in chosen]
        # Updates take completions: these are of one token, which is not compared.
        self._sequences: list[Completion] = from_first_rank(self._grids, [
            Completion(prompt.key, index, prompt.token_ids, prompt.token_ids[-1:], (0.0,), "length", 0.0, index,
                       prompt.image_sizes, 0 if policy.images is None else policy.images.count(prompt))
            for index, prompt in enumerate(chosen)])

    def trainer_logprobs(self) -> list[list[float | None]]:
        """Of each prompt, of each token from the second on; None for those of images. On every rank."""
        microbatches = self._policy.microbatches(self._sequences)
        values = self._policy.old_log_probs(microbatches, temperature=1.0)
        own: dict[int, list[float | None]] = {}
        if self._policy.parts.counts_losses:
            for batch, found in zip(microbatches, values, strict=True):
                own |= self._by_prompt(batch, found.tolist())
        by_prompt = {index: row for each in gather(self._grids, own) for index, row in each.items()}
        return [by_prompt[index] for index in range(len(self._sequences))]

    def compare(self, trainer_logprobs: list[list[float | None]]) -> None:
        """Ask the engine for the same, on the first rank.

        Args:
            trainer_logprobs: `trainer_logprobs` of the weights that the engine has.

        Raises:
            RefitError: on the first rank: the engine did not answer, or a token's log-probs differ by more than the
                tolerance; with prompt, token and both values.
            ReportedElsewhereError: on the other ranks then.
        """
        error = None
        if self._client is not None:
            try:
                compare_logprobs(self._client, self._requests, trainer_logprobs, self._tolerance,
                                 [each.key for each in self._sequences])
            except (RefitError, ValueError) as problem:
                error = RefitError(f"--refit-verify: {problem}")
        failed = from_first_rank(self._grids, error is not None)
        if error is not None:
            raise error
        if failed:
            raise ReportedElsewhereError("rank 0 reports what is wrong")

    def _by_prompt(self, batch: PolicyMicrobatch, values: list[float]) -> dict[int, list[float | None]]:
        images = set() if self._policy.images is None else set(self._policy.images.modules.values())
        rows: dict[int, list[float | None]] = {member: [] for member in batch.members}
        numbers = batch.sampled.sequence_ids.tolist()
        for row, label, value in zip(numbers, batch.labels[0].tolist(), values, strict=True):
            if label >= 0:
                rows[batch.members[row]].append(None if label in images else value)
        return {member: row[:-1] for member, row in rows.items()}
