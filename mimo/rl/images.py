"""Images and videos of prompts: requests to the engine, their tokens, and the encoder's side of microbatches.

Each encoder rank builds the pixels of its completions from the prompt set, which is a pure function of seed, split and
index. Only encoder windows send them: the reader of a lane builds those of its lane.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mimo.data.batch import EncoderBatch
from mimo.data.collate import Expanded, Placeholders, collate_encoder, expand_images, image_grids
from mimo.grid.lanes import Need, lanes_read_by, needs_of
from mimo.grid.spec import Layout
from mimo.observability.trackers import MAX_SHOWN_SIDE
from mimo.protocols import LANGUAGE, ImageSize, Sample, VideoSize
from mimo.rl.prompts import ImagePromptSet, Prompt, PromptSet, VideoPromptSet
from mimo.visual import Normalisation, multimodal_positions

if TYPE_CHECKING:
    from mimo.rl.rollouts import Completion
    from mimo.rollout.engine import Sampling


def as_request(prompt: Prompt, tail: Sequence[int] = ()) -> dict[str, Any]:
    """Return a prompt as a request of vLLM: its tokens with one placeholder a video, PIL images, and frames of videos.

    A model that cuts images into tiles gets whole images, which the engine cuts in the same way. `tail` are tokens
    behind the prompt.

    Raises:
        ValueError: pictures and videos of the prompt do not match, or it has tiles without the whole images.
    """
    ids = [*prompt.token_ids, *tail]
    for video in reversed(prompt.videos):
        ids[video.start:video.stop] = [video.placeholder]
    request: dict[str, Any] = {"prompt_token_ids": ids}
    if not prompt.image_sizes:
        return request
    from PIL import Image

    if prompt.originals is not None:
        request["multi_modal_data"] = {"image": [Image.fromarray(picture) for picture in prompt.originals()]}
        return request
    pictures = prompt.pictures()
    images = [Image.fromarray(picture) for picture in pictures if picture.ndim == 3]
    parts = [picture for picture in pictures if picture.ndim == 4]
    if any(picture.ndim == 4 and not isinstance(size, VideoSize)
           for picture, size in zip(pictures, prompt.image_sizes, strict=False)):
        raise ValueError(f"prompt {prompt.key} has tiles of images without the whole images (Prompt.originals), which "
                         "the rollout engine cuts itself")
    declared = sum(video.num_placeholders for video in prompt.videos)
    if declared != len(parts):
        raise ValueError(f"prompt {prompt.key} has frames for {len(parts)} placeholders, and its videos "
                         f"(Prompt.videos) have {declared}")
    videos, first = [], 0
    for video in prompt.videos:
        last = first + video.num_placeholders
        # The last frame may be repeated to fill a temporal patch, which the engine does itself.
        frames = np.concatenate(parts[first:last])[:len(video.frame_indices)]
        videos.append((frames, {
            "fps": video.fps, "duration": video.num_frames / video.fps, "total_num_frames": video.num_frames,
            "frames_indices": list(video.frame_indices), "video_backend": "pyav", "do_sample_frames": False}))
        first = last
    request["multi_modal_data"] = ({"image": images} if images else {}) | ({"video": videos} if videos else {})
    return request


def request_digest(request: Mapping[str, Any], sampling: Sampling) -> str:
    """Return a digest of all that the completions of a request depend on, besides the weights and the seed.

    `request` is one of `as_request`. Its pixels count.
    """
    media = request.get("multi_modal_data", {})
    arrays: list[tuple[np.ndarray, Any]] = [(np.asarray(image), "image") for image in media.get("image", ())]
    arrays += media.get("video", ())
    digest = hashlib.sha256(repr((list(request["prompt_token_ids"]), sampling)).encode())
    for array, about in arrays:
        digest.update(repr((array.shape, about)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def reduced(picture: np.ndarray) -> np.ndarray:
    """Return a picture, uint8 `[height, width, channels]`, with at most `MAX_SHOWN_SIDE` pixels a side.

    A part of a video is shown by its first frame, and an image of several tiles by the first, which shows all of it.
    """
    from PIL import Image

    if picture.ndim == 4:
        picture = picture[0]
    image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
    image.thumbnail((MAX_SHOWN_SIDE, MAX_SHOWN_SIDE))
    return np.asarray(image).reshape(image.height, image.width, -1)


class ImageTokens(Placeholders):
    """How the images of prompts become tokens."""

    @property
    def ids(self) -> set[int]:
        """Placeholder ids of images and videos."""
        return {*self.modules.values(), *self.video_ids.values()}

    def count(self, prompt: Prompt) -> int:
        """Count the tokens that a prompt's images and videos become.

        Raises:
            ValueError: placeholders do not match images and videos, or the encoder cannot take one of them.
        """
        sample = _sample(prompt.key, prompt.token_ids, prompt.image_sizes)
        return sum(expand_images(sample, self).image_tokens.values())

    def expanded(self, completion: Completion) -> Expanded:
        """Return the tokens of a completion's prompt with placeholders repeated for each image token."""
        row = expand_images(_sample(completion.key, completion.prompt_ids, completion.image_sizes), self)
        assert len(row.tokens) == completion.prompt_length, (completion.key, len(row.tokens), completion.prompt_length)
        return row

    def placeholders(self, prompts: Sequence[Expanded], starts: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the places of image tokens in a packed row, as int64 indices by module.

        They follow from the prompts: a placeholder that the policy itself has sampled does not stand for an image.
        """
        return {module: torch.from_numpy(np.concatenate(
            [start + prompt.places(module) for start, prompt in zip(starts, prompts, strict=True)]))
            for module in self.modules}

    def positions(self, completions: Sequence[Completion], prompts: Sequence[Expanded],
                  cu_seqlens: torch.Tensor) -> torch.Tensor | None:
        """Return the positions of a packed row on three axes, int64 `[3, 1, t]`; None for a decoder with one.

        Args:
            completions: sequences of the row, in order.
            prompts: their prompts.
            cu_seqlens: where each sequence starts, with its own padding behind it; the last entry is `t`. Padding at
                the end of the row is a sequence of its own.
        """
        if self.token_grid is None:
            return None
        grids = []
        for completion, prompt, start in zip(completions, prompts, cu_seqlens.tolist(), strict=False):
            grids += [(start + place, grid)
                      for place, grid in image_grids(completion.image_sizes, prompt, self.token_grid)]
        return torch.from_numpy(multimodal_positions(cu_seqlens.diff().tolist(), grids))[:, None]

    def text_parts(self, completions: Sequence[Completion], count: int) -> dict[str, Any]:
        """Return what the language side of a microbatch says of images, in the parts that encoder ranks share.

        Returns:
            Fields of `TextBatch`: `keys`, `count` of them, and by module the image tokens of each part
            (`token_counts`), of each image (`image_lengths`) and of each tile (`tile_lengths`).
        """
        parts = [_pack(each) for each in cut(completions, count)]
        rows = [expand_images(part, self) for part in parts]
        return {"keys": tuple(part.key for part in parts), "token_counts": {
                    module: tuple(row.image_tokens[module] for row in rows) for module in self.modules},
                "image_lengths": {
                    module: tuple(tokens for row in rows for tokens in row.images[module]) for module in self.modules},
                "tile_lengths": self.tile_lengths(rows, parts)}


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
        # 8-bit pixels of a microbatch are normalised together.
        self._normalisation = None
        if isinstance(prompts, ImagePromptSet) and prompts.normalisation == _video_normalisation(prompts):
            self._normalisation = prompts.normalisation
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
        batches: list[dict[str, EncoderBatch]] = [{} for _ in lanes[0]]
        for number, by_module in enumerate(batches):
            for module, needs in self._needs.items():
                samples, pixels = [], needs[0].pixels
                for need in needs:
                    members = [completions[member] for member in lanes[need.share.lane][number]]
                    for part in cut(members, self._count)[need.share.start:need.share.stop]:
                        samples.append(_pack(part))
                        if pixels:
                            samples[-1].images = [image for each in part for image in self._pixels(each, drawn)]
                            samples[-1].normalisation = self._normalisation
                by_module[module] = collate_encoder(
                    samples, module=module, images=self._images, pixels=pixels, dtype=self._dtype,
                    lane_sizes=[need.share.stop - need.share.start for need in needs])
        return batches

    def _pixels(self, completion: Completion, drawn: dict[int, list[np.ndarray]]) -> list[np.ndarray]:
        """Build the pixels of a completion's prompt once for a global batch.

        They are `[C, height, width]` for each image and `[frames, C, height, width]` for each part of a video, uint8 if
        all have one normalisation and else float32.
        """
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
            images, videos = self._prompts.normalisation, _video_normalisation(self._prompts)
            drawn[completion.index] = [
                np.ascontiguousarray(np.moveaxis(picture, -1, -3)) if self._normalisation is not None
                else (images if picture.ndim == 3 else videos).apply(picture) for picture in prompt.pictures()]
        return drawn[completion.index]


def _video_normalisation(prompts: ImagePromptSet) -> Normalisation:
    """Return the normalisation of videos, which may differ from that of images."""
    if isinstance(prompts, VideoPromptSet) and prompts.video_processing is not None:
        return Normalisation(prompts.video_processing.mean, prompts.video_processing.std)
    return prompts.normalisation


def needs_pixels(layout: Layout, rank: int) -> bool:
    """Whether a rank builds pixels: it holds the first stage of an encoder, or deals the pixels of a lane."""
    if layout.encoder_window is not None:
        return bool(lanes_read_by(layout, rank))
    return any(rank in grid.ranks and not grid.coordinates(rank)["pp"] for grid in layout.encoders)


def cut(completions: Sequence[Completion], count: int) -> list[Sequence[Completion]]:
    """Cut into `count` consecutive parts, as even as possible; some are empty if there are fewer completions."""
    ends = [len(completions) * number // count for number in range(count + 1)]
    return [completions[start:stop] for start, stop in itertools.pairwise(ends)]


def _sample(key: str, token_ids: Sequence[int], image_sizes: Sequence[ImageSize]) -> Sample:
    """Return a prompt as a sample without pixels and targets."""
    tokens = np.array(token_ids, np.int64)
    return Sample(key, tokens, np.zeros(len(tokens), np.bool_), list(image_sizes))


def _pack(completions: Sequence[Completion]) -> Sample:
    """Concatenate the prompts of completions to one sample."""
    return _sample(" ".join(each.key for each in completions), [token for each in completions for token in
                                                                each.prompt_ids],
                   [size for each in completions for size in each.image_sizes])
