"""What a data set of prompts looks like to reinforcement learning. Plain data and protocols; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from mimo.protocols import TokenSpec


@dataclass(frozen=True)
class Prompt:
    """Something to complete, and what a completion is scored against.

    Attributes:
        key: name of the prompt, unique in its data set.
        text: what the model goes on from, chat template included.
        token_ids: of the text; at least one.
        ground_truth: the answer, for the reward.
        metadata: other fields, for the reward.
    """

    key: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class PromptSet(Protocol):
    """One split of a data set of prompts, in the order of a seed."""

    @property
    def end_token_id(self) -> int:
        """Ends a completion."""
        ...

    @property
    def pad_token_id(self) -> int:
        """Fills rows."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The prompt at a place, from 0, without end: the same for the same seed, split and index."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""
        ...


class PromptProvider(Protocol):
    """A data set of prompts that plugs in by name (`--dataset-provider NAME` or `pkg.module:attr`)."""

    Config: ClassVar[type]

    def validate(self, config: Any, tokens: TokenSpec) -> None:
        """Raise ValueError, naming flags and values, for what cannot work. Called before process groups exist."""
        ...

    def open(self, config: Any, tokens: TokenSpec, split: str, seed: int) -> PromptSet:
        """Open a split, `train` or `valid`. Raises ValueError as `validate`."""
        ...
