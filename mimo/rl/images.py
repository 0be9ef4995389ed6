"""Images of prompts: requests to the engine, image tokens, and the encoder's side of microbatches.

Each encoder rank builds the pixels of its completions from the prompt set, which is a pure function of seed, split and
index. Only encoder windows send them: the reader of a lane builds those of its lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mimo.data.batch import EncoderBatch
from mimo.data.collate import Placeholders, collate_encoder, expand_images, image_grids
from mimo.data.positions import multimodal_positions
from mimo.grid.lanes import Need, lanes_read_by, needs_of
from mimo.grid.spec import Layout
from mimo.observability.trackers import MAX_SHOWN_SIDE
from mimo.protocols import LANGUAGE, Sample, VideoSize
from mimo.rl.prompts import ImagePromptSet, Prompt, PromptSet

if TYPE_CHECKING:
    from mimo.rl.rollouts import Completion


def as_request(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as a request of vLLM: its tokens, and its images as PIL images."""
    request: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
    if prompt.image_sizes:
        from PIL import Image

        request["multi_modal_data"] = {"image": [Image.fromarray(picture) for picture in prompt.pictures()]}
    return request


def reduced(picture: np.ndarray) -> np.ndarray:
    """Return a picture, uint8 `[height, width, channels]`, with at most `MAX_SHOWN_SIDE` pixels a side."""
    from PIL import Image

    image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
    image.thumbnail((MAX_SHOWN_SIDE, MAX_SHOWN_SIDE))
    return np.asarray(image).reshape(image.height, image.width, -1)


class ImageTokens(Placeholders):
    """How the images of prompts become tokens."""

    def count(self, prompt: Prompt) -> int:
        """Count the tokens that a prompt's images become.

        Raises:
            ValueError: placeholders and images do not match, an image has a size that its encoder cannot take, or there
                is a video.
        """
        if any(isinstance(size, VideoSize) for size in prompt.image_sizes):
            raise ValueError(f"prompt {prompt.key} has a video; prompts of train_rl.py may have images, no videos")
        sample = _sample(prompt.key, prompt.token_ids, prompt.image_sizes)
        return sum(expand_images(sample, self).image_tokens.values())

    def expanded(self, completion: Completion) -> np.ndarray:
        """Return the prompt's tokens with placeholders repeated for each image token, int64 `[prompt_length]`."""
        sample = _sample(completion.key, completion.prompt_ids, completion.image_sizes)
        tokens = expand_images(sample, self).tokens
        assert len(tokens) == completion.prompt_length, (completion.key, len(tokens), completion.prompt_length)
        return tokens

    def placeholders(self, prompts: Sequence[np.ndarray], starts: Sequence[int]) -> dict[str, torch.Tensor]:
        """Find the image tokens of expanded prompts in a packed row, as int64 indices by module.

        Only prompts are searched: a placeholder that the policy itself has sampled does not stand for an image.

        Args:
            prompts: prompts of the row's sequences.
            starts: starts of the sequences in the row.
        """
        return {module: torch.from_numpy(np.concatenate(
            [start + np.flatnonzero(prompt == token) for start, prompt in zip(starts, prompts, strict=True)]))
            for module, token in self.modules.items()}

    def positions(self, completions: Sequence[Completion], cu_seqlens: torch.Tensor) -> torch.Tensor | None:
        """Return the positions of a packed row on three axes, int64 `[3, 1, t]`; None for a decoder with one.

        Args:
            completions: sequences of the row, in order.
            cu_seqlens: where each sequence starts, with its own padding behind it; the last entry is `t`. Padding at
                the end of the row is a sequence of its own.
        """
        if self.token_grid is None:
            return None
        grids, starts = [], cu_seqlens.tolist()
        for completion, start in zip(completions, starts, strict=False):
            sample = _sample(completion.key, completion.prompt_ids, completion.image_sizes)
            row = expand_images(sample, self)
            grids += [(start + place, grid) for place, grid in image_grids(sample, row, self.token_grid)]
        return torch.from_numpy(multimodal_positions(cu_seqlens.diff().tolist(), grids))[:, None]

    def text_parts(self, completions: Sequence[Completion], count: int) -> (
            tuple[tuple[str, ...], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]):
        """Return what the language side of a microbatch says of images, in the parts that encoder ranks share.

        Args:
            completions: completions of the microbatch.
            count: number of parts.

        Returns:
            For `TextBatch`: keys, `count` of them; by module, the image tokens of each part and of each image.
        """
        parts = [_pack(each) for each in cut(completions, count)]
        rows = [expand_images(part, self) for part in parts]
        return (tuple(part.key for part in parts),
                {module: tuple(row.image_tokens[module] for row in rows) for module in self.modules},
                {module: tuple(tokens for row in rows for tokens in row.images[module]) for module in self.modules})


class EncoderSide:
    """Builds the input of this rank's encoders for policy microbatches.

    Args:
        images: how the model takes images.
        layout: all grids.
        rank: this process.
        parts: number of parts into which a lane's microbatches are cut.
        prompts: source of the pixels; None on ranks that need none.
        dtype: dtype of pixels.
    """

    def __init__(self, images: ImageTokens, layout: Layout, rank: int, parts: int, prompts: PromptSet | None,
                 dtype: torch.dtype) -> None:
        self._images, self._count, self._prompts, self._dtype = images, parts, prompts, dtype
        self._normalisation = prompts.normalisation if isinstance(prompts, ImagePromptSet) else None
        self._needs: dict[str, list[Need]] = {}
        for need in needs_of(layout, rank, parts):
            if need.module != LANGUAGE:
                self._needs.setdefault(need.module, []).append(need)

    def batches(self, lanes: Sequence[Sequence[Sequence[int]]],
                completions: Sequence[Completion]) -> list[dict[str, EncoderBatch]]:
        """Return the encoders' side of every microbatch of this rank, by module.

        Args:
            lanes: for each lane and each of its microbatches, positions in `completions`.
            completions: completions of the global batch.

        Raises:
            ValueError: an image is not what its prompt declares, or this rank's prompt set differs from the first's.
        """
        drawn: dict[int, list[np.ndarray]] = {}
        return [{module: self._batch(module, needs, [lanes[need.share.lane][number] for need in needs], completions,
                                     drawn) for module, needs in self._needs.items()}
                for number in range(len(lanes[0]))]

    def _batch(self, module: str, needs: Sequence[Need], members: Sequence[Sequence[int]],
               completions: Sequence[Completion], drawn: dict[int, list[np.ndarray]]) -> EncoderBatch:
        pixels = needs[0].pixels
        samples = []
        for need, chosen in zip(needs, members, strict=True):
            for part in cut([completions[member] for member in chosen], self._count)[need.share.start:need.share.stop]:
                samples.append(_pack(part))
                if pixels:
                    samples[-1].images = [image for each in part for image in self._pixels(each, drawn)]
                    samples[-1].normalisation = self._normalisation
        return collate_encoder(
            samples, module=module, images=self._images, pixels=pixels, dtype=self._dtype,
            lane_sizes=[need.share.stop - need.share.start for need in needs])

    def _pixels(self, completion: Completion, drawn: dict[int, list[np.ndarray]]) -> list[np.ndarray]:
        """Build the images of a completion's prompt, uint8 `[C, height, width]`, once for a global batch."""
        if not completion.image_sizes:
            return []
        if completion.index not in drawn:
            if not isinstance(self._prompts, ImagePromptSet):
                raise ValueError(f"the prompt of completion {completion.key} has images, and the prompt set does not "
                                 "say how to normalise them (mimo.rl.prompts.ImagePromptSet)")
            prompt = self._prompts.prompt(completion.index)
            if prompt.token_ids != completion.prompt_ids or prompt.image_sizes != completion.image_sizes:
                raise ValueError(f"prompt {completion.index} is {prompt.key} on an encoder rank and differs from the "
                                 f"prompt of completion {completion.key}: a prompt set has to return the same prompt "
                                 "for the same seed, split and index on every rank")
            drawn[completion.index] = [np.ascontiguousarray(picture.transpose(2, 0, 1))
                                       for picture in prompt.pictures()]
        return drawn[completion.index]


def needs_pixels(layout: Layout, rank: int) -> bool:
    """Whether a rank builds pixels: it holds the first stage of an encoder, or deals the pixels of a lane."""
    if layout.encoder_window is not None:
        return bool(lanes_read_by(layout, rank))
    return any(rank in grid.ranks and not grid.coordinates(rank)["pp"] for grid in layout.encoders)


def cut(completions: Sequence[Completion], count: int) -> list[Sequence[Completion]]:
    """Cut into `count` consecutive parts, as even as possible; some are empty if there are fewer completions."""
    ends = [len(completions) * number // count for number in range(count + 1)]
    return [completions[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]


def _sample(key: str, token_ids: Sequence[int], image_sizes: Sequence[tuple[int, int]]) -> Sample:
    """Return a prompt as a sample without pixels and targets."""
    tokens = np.array(token_ids, np.int64)
    return Sample(key, tokens, np.zeros(len(tokens), np.bool_), list(image_sizes))


def _pack(completions: Sequence[Completion]) -> Sample:
    """Concatenate the prompts of completions to one sample."""
    return _sample(" ".join(each.key for each in completions), [token for each in completions for token in
                                                                each.prompt_ids],
                   [size for each in completions for size in each.image_sizes])
