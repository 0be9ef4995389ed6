"""Prompts, data sets of prompts and rewards of reinforcement learning: plain data and protocols, without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from mimo.protocols import ImageSize, TokenSpec, VideoProcessing
from mimo.visual import Normalisation


@dataclass(frozen=True)
class PromptVideo:
    """A video among the tokens of a prompt, for the engine, which writes such tokens itself.

    Attributes:
        start: index in `Prompt.token_ids` of the video's first token. Texts that say the time are tokens of the video.
        stop: index behind its last token.
        placeholder: the model's video token, which stands for the whole video in the engine's prompt.
        num_placeholders: how many placeholders are among its tokens, each with a part of the video.
        frame_indices: number of each sampled frame in the video file.
        num_frames: frames in the file.
        fps: frames a second of the file.
    """

    start: int
    stop: int
    placeholder: int
    num_placeholders: int
    frame_indices: tuple[int, ...]
    num_frames: int
    fps: float


@dataclass(frozen=True)
class Prompt:
    """Prompt to complete, with the answer against which completions are scored.

    Attributes:
        key: name of the prompt, unique in its data set.
        text: text that the model continues, chat template included.
        token_ids: tokens of the text; at least one. Each image is one placeholder, the model's image token. So is each
            video, or each part of it that has a placeholder of its own, with the model's video token.
        ground_truth: the answer, for the reward.
        metadata: other fields, for the reward.
        image_sizes: `(height, width)` in pixels of each image and a `VideoSize` for each placeholder of a video, in the
            order of the placeholders.
        pictures: makes the pixels of each placeholder, uint8 `[height, width, channels]` for an image, `[tiles, height,
            width, channels]` for one that the model takes as tiles, and `[frames, height, width, channels]` for a
            video, of the size that the encoder takes. Called only where pixels are needed; the same at every call.
        videos: where the videos are among the tokens, in order.
        originals: makes the whole images of which the model takes tiles, uint8 `[height, width, channels]`; None for
            other models, whose pictures are whole images.
    """

    key: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    image_sizes: tuple[ImageSize, ...] = ()
    pictures: Callable[[], list[np.ndarray]] = list
    videos: tuple[PromptVideo, ...] = ()
    originals: Callable[[], list[np.ndarray]] | None = None


class BadPromptError(ValueError):
    """A prompt cannot be used, because of its record in the data. Runs go on without it, see `SkippingPromptSet`.

    Attributes:
        key: name of the prompt.
    """

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class PromptSet(Protocol):
    """One split of a data set of prompts, in the order of a seed."""

    @property
    def end_token_id(self) -> int:
        """Token that ends a completion."""
        ...

    @property
    def pad_token_id(self) -> int:
        """Token for padding."""
        ...

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at any index from 0 on. It depends only on seed, split and index."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""
        ...


@runtime_checkable
class ManyEndsPromptSet(PromptSet, Protocol):
    """Prompt set with several tokens that end a completion, such as those of a turn and of a text."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a completion, `end_token_id` among them."""
        ...


@runtime_checkable
class FinitePromptSet(PromptSet, Protocol):
    """Prompt set that repeats the same prompts, each of them once a pass."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts of a pass. Indices 0 to `num_prompts` - 1 cover all prompts."""
        ...

    def leave_out(self, keys: Collection[str]) -> None:
        """Leave out the prompts of these names. Passes become shorter, and the others stay in the same order."""
        ...


@runtime_checkable
class StoredPromptSet(FinitePromptSet, Protocol):
    """Prompt set that reads some prompts faster in another order than that of their indices."""

    def in_stored_order(self, indices: Sequence[int]) -> list[int]:
        """Sort indices in the order in which reading all of their prompts is fastest."""
        ...


@runtime_checkable
class SkippingPromptSet(FinitePromptSet, Protocol):
    """Prompt set that may have bad prompts: `prompt`, or functions of its result, raise BadPromptError for them."""

    @property
    def max_bad_samples(self) -> int:
        """Number of bad prompts that a run may skip. One more ends it."""
        ...


@runtime_checkable
class ImagePromptSet(PromptSet, Protocol):
    """Prompt set whose prompts may have images."""

    @property
    def normalisation(self) -> Normalisation:
        """Normalisation of all pictures of the data set."""
        ...


@runtime_checkable
class VideoPromptSet(ImagePromptSet, Protocol):
    """Prompt set whose prompts may have videos, too."""

    @property
    def video_processing(self) -> VideoProcessing | None:
        """Processing of all videos of the data set; None if the model takes no videos."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Hugging Face tokenizer that has written the texts between the parts of a video."""
        ...


def without_ends(token_ids: Sequence[int], end_token_ids: Collection[int]) -> list[int]:
    """Return the tokens of a completion without those that end it.

    A tokenizer may have the end of a turn among its ordinary tokens, which it writes even without special tokens.
    """
    count = len(token_ids)
    while count and token_ids[count - 1] in end_token_ids:
        count -= 1
    return list(token_ids[:count])


class PromptProvider(Protocol):
    """Data set of prompts, found by name (`--dataset-provider NAME` or `pkg.module:attr`)."""

    Config: ClassVar[type]

    def validate(self, config: Any, tokens: TokenSpec) -> None:
        """Raise ValueError, naming flags and values, for what cannot work. Called before process groups exist."""
        ...

    def open(self, config: Any, tokens: TokenSpec, split: str, seed: int) -> PromptSet:
        """Open a split, `train` or `valid`. Raises ValueError as `validate`."""
        ...


class Reward(Protocol):
    """Scores one completion. Any callable of this form plugs in by name (`--reward NAME` or `pkg.module:fn`).

    With `--reward-threads`, it is called on several threads at the same time.
    """

    def __call__(self, prompt: str, completion: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
        """Return the score, a finite number. The built-in rewards return 1.0 for a right answer and 0.0 for any other.

        Args:
            prompt: text of the prompt, chat template included.
            completion: text that the model wrote, without special tokens at its end.
            ground_truth: the data set's answer.
            metadata: the data set's other fields of the sample, and `finish_reason`, which is `stop`, or `length` if
                the length limit cut the completion off.

        Raises:
            ValueError: the ground truth or the metadata cannot be scored against. No completion raises an error.
        """
        ...
