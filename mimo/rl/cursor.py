"""Position of a run among its prompts, saved in checkpoints so that a resumed run sees the same rollouts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mimo.checkpoint.paths import SHARED_STREAM
from mimo.rollout.engine import Rollout

STREAM = f"{SHARED_STREAM}/0"


@dataclass(frozen=True)
class Pending:
    """Answers that were drawn and not trained on yet.

    Attributes:
        prompts: token ids of each prompt from the next one on.
        answers: the engine's answers to each prompt.
        version: policy version that drew them.
        seconds: how long the engine took.
    """

    prompts: list[tuple[int, ...]]
    answers: list[list[Rollout]]
    version: str
    seconds: float


@dataclass
class PromptCursor:
    """Position among the prompts. It is the same on every rank, but only the first rank has the pending answers.

    Attributes:
        first: index of the next iteration's first prompt.
        pending: answers to that iteration's prompts, if they were prefetched (`--rollout-mode one-step-off`).
    """

    first: int = 0
    pending: Pending | None = None

    def streams(self, *, is_first_rank: bool) -> dict[str, Any]:
        """Return the position as plain data, for `RunState`."""
        own = {STREAM: {"prompts": self.first, "pending": None if self.pending is None else asdict(self.pending)}}
        return {"consumed_samples": self.first, "streams": own if is_first_rank else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to the position at which `streams` was called.

        Args:
            state: what it returned; the first rank needs the stream.

        Raises:
            ValueError: this is the state of another program.
        """
        self.first = state["consumed_samples"]
        found = state["streams"].get(STREAM)
        if state["streams"] and (not isinstance(found, dict) or "prompts" not in found):
            raise ValueError("this checkpoint is from train_hetero.py; --finetune starts a new run with its weights")
        if found is not None and found["pending"] is not None:
            answers = [[Rollout(tuple(each["token_ids"]), tuple(each["logprobs"]), each["version"],
                                each["finish_reason"]) for each in group] for group in found["pending"]["answers"]]
            prompts = [tuple(token_ids) for token_ids in found["pending"]["prompts"]]
            self.pending = Pending(prompts, answers, found["pending"]["version"], found["pending"]["seconds"])
