"""Images and videos, as the trainer, model families and data sets describe them to each other.

Importing this module needs no torch. Most of these names are in `mimo.protocols`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from mimo.protocols import ModelProvider, TokenSpec

# Axes of a token's position: time, row and column.
NUM_AXES = 3


class VideoSize(NamedTuple):
    """Size of a video, or of a part of one that has a placeholder of its own.

    Attributes:
        height: pixels of a frame's height.
        width: pixels of a frame's width.
        frames: sampled frames, padded to a multiple of `TokenSpec.temporal_patch_size`.
        frame_seconds: seconds from one sampled frame to the next; families whose text says the time need none.
    """

    height: int
    width: int
    frames: int
    frame_seconds: float = 0.0


type ImageSize = tuple[int, int] | VideoSize
"""Height and width of an image in pixels, or the size of a video."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of a model that joins the tokens of an image's tiles: the whole image, then a grid that holds it.

    Attributes:
        size: height and width of a tile in pixels.
        pinpoints: height and width in pixels of each grid that may be used.
        token_shape: rows and columns of the tokens that the encoder's layers make of a tile.
    """

    size: tuple[int, int]
    pinpoints: tuple[tuple[int, int], ...]
    token_shape: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        return self.token_shape[0] * self.token_shape[1]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the grid of tiles that holds most of an image and wastes least."""
        rows, columns = best_pinpoint(height, width, self.pinpoints)
        return rows // self.size[0], columns // self.size[1]

    def count(self, height: int, width: int) -> int:
        """Return the number of tiles of an image."""
        rows, columns = self.grid(height, width)
        return 1 + rows * columns

    def shown(self, height: int, width: int) -> tuple[range, range]:
        """Return the rows and columns of the grid's tokens that show an image, and not the borders around it.

        This repeats `unpad_image` of transformers operation by operation, because rounding decides some sizes.
        """
        rows, columns = (count * each for count, each in zip(self.grid(height, width), self.token_shape, strict=True))
        if width / height > columns / rows:
            border = (rows - int(round(height * (columns / width), 7))) // 2
            return range(border, rows - border), range(columns)
        border = (columns - int(round(width * (rows / height), 7))) // 2
        return range(rows), range(border, columns - border)

    def num_encoded(self, height: int, width: int) -> int:
        """Return the tokens of an image's tiles in the encoder's layers."""
        return self.count(height, width) * self.num_tokens

    def num_joined(self, height: int, width: int) -> int:
        """Return the tokens of an image: of the whole image, then of the grid's rows, each with a token at its end."""
        rows, columns = self.shown(height, width)
        return self.num_tokens + len(rows) * (len(columns) + 1)

    def token_order(self, height: int, width: int) -> np.ndarray:
        """Return the tokens of an image, int64, as indices into those of its tiles; -1 is the token that ends a row."""
        (tall, wide), (_, per_row) = self.token_shape, self.grid(height, width)
        rows, columns = (np.array(places, np.int64) for places in self.shown(height, width))
        tile = 1 + rows[:, None] // tall * per_row + columns // wide
        order = tile * self.num_tokens + rows[:, None] % tall * wide + columns % wide
        ends = np.full((len(rows), 1), -1)
        return np.concatenate([np.arange(self.num_tokens), np.concatenate([order, ends], axis=1).flatten()])


def best_pinpoint(height: int, width: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the grid, in pixels, that holds most of an image and wastes least (`select_best_resolution`)."""
    def fitness(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]

    return max(pinpoints, key=fitness)  # the first of equally good ones


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of 8-bit pixels, (value / 255 - mean) / std, which a rollout engine's image processor computes too.

    Attributes:
        mean, std: mean and standard deviation of each channel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, levels: np.ndarray) -> np.ndarray:
        """Convert uint8 `[..., channels, height, width]` to float32."""
        assert levels.dtype == np.uint8 and levels.shape[-3] == len(self.mean), (levels.dtype, levels.shape)
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        scaled: np.ndarray = (levels.astype(np.float32) / np.float32(255) - mean) / std
        return scaled

    def apply(self, picture: np.ndarray) -> np.ndarray:
        """Convert uint8 `[..., height, width, channels]` to float32 `[..., channels, height, width]`."""
        return self.normalise(np.ascontiguousarray(np.moveaxis(picture, -1, -3)))


@dataclass(frozen=True)
class ImageProcessing:
    """Conversion of the pixels of an image file to an encoder's input, as a Hugging Face image processor describes it.

    Attributes:
        tiling: a value of --image-tiling other than auto.
        mean: mean of each channel, of pixels in 0..1.
        std: standard deviation of each channel, of pixels in 0..1.
        resample: kernel with which images are resized, always with antialiasing.
        min_patches: with dynamic tiling or smart_resize, fewest patches of an image; 0: not specified.
        max_patches: with dynamic tiling or smart_resize, most patches of an image; 0: not specified; -1: no limit.
        min_side: with dynamic tiling, fewest pixels of the shorter side if that is possible; 0: any number.
        max_tiles: with fixed tiling, most tiles of an image; 0: not specified.
        use_thumbnail: with fixed tiling, whether several tiles are followed by the whole image.
        source: where these values were found, for messages.
    """

    tiling: Literal["stretch", "crop", "pad", "fixed", "anyres", "dynamic", "smart_resize"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    min_patches: int = 0
    max_patches: int = 0
    min_side: int = 0
    max_tiles: int = 0
    use_thumbnail: bool = False
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class VideoProcessing:
    """Conversion of a video file to an encoder's input, as a Hugging Face video processor describes it.

    Attributes:
        rule: the family whose processor chooses frames and their size.
        mean: mean of each channel, of pixels in 0..1.
        std: standard deviation of each channel, of pixels in 0..1.
        fps: frames of a second that are sampled; 0: all frames, unless `num_frames` is given.
        min_frames: fewest sampled frames, as far as the video has them.
        max_frames: most sampled frames.
        min_pixels: fewest pixels, of each frame (qwen2_5_vl) or of all frames together (qwen3_vl).
        max_pixels: most pixels, of each frame (qwen2_5_vl) or of all frames together (qwen3_vl).
        temporal_patch_size: frames of a patch.
        timestamps: whether each temporal patch is a video of its own for the model, behind text that says its time. If
            not, the whole video has one placeholder.
        resample: kernel with which frames are resized, always with antialiasing.
        num_frames: frames that are sampled of each video, however long it is; 0: as `fps` says.
        max_tokens: a further limit, which is the context whose nine tenths a video may fill (qwen2_5_vl), or the tokens
            of a frame (qwen3_vl); 0: none.
        source: where these values were found, for messages.
    """

    rule: Literal["qwen2_5_vl", "qwen3_vl"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    temporal_patch_size: int
    timestamps: bool
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    num_frames: int = 0
    max_tokens: int = 0
    source: str = field(default="", compare=False)


@runtime_checkable
class ImageDataProvider(Protocol):
    """A data set whose flags describe how its images become pixels."""

    def with_image_processing(self, config: Any, find: Callable[[], Sequence[ImageProcessing]]) -> Any:
        """Return the flags, with the values that come from the model filled in.

        Args:
            config: the data set's flags.
            find: reads what the model's processor files specify, or else returns its family's processor; empty if the
                family has none. Called only if the flags leave a value open.

        Raises:
            ValueError: a value is missing, or there are two values for it; or as `find`.
        """
        ...

    def image_processing(self, config: Any, tokens: TokenSpec) -> ImageProcessing:
        """Describe how images become pixels, given flags whose values are all filled in."""
        ...


@runtime_checkable
class EightBitDataProvider(Protocol):
    """A data set that says whether its samples have 8-bit pixels, so that plans can count their bytes."""

    def normalisation(self, config: Any, tokens: TokenSpec) -> Normalisation | None:
        """Return the `normalisation` of its samples; None if their pixels are floats."""
        ...


@runtime_checkable
class VideoDataProvider(Protocol):
    """A data set whose flags describe how its videos become pixels."""

    def with_video_processing(self, config: Any, find: Callable[[], Sequence[VideoProcessing]]) -> Any:
        """Return the flags, with the values that come from the model filled in; see `ImageDataProvider`.

        Args:
            config: the data set's flags.
            find: reads what the model's processor files specify; empty if the model takes no videos.

        Raises:
            ValueError: there are flags of videos and the model takes none, or two values for one; or as `find`.
        """
        ...

    def video_processing(self, config: Any, tokens: TokenSpec) -> VideoProcessing | None:
        """Describe how videos become pixels, given flags that are filled in; None if the model takes none."""
        ...


@runtime_checkable
class TokenGridProvider(Protocol):
    """A model provider whose decoder rotates positions of three axes: time, row and column."""

    def token_grid(self, config: Any, module: str, height: int, width: int) -> TokenGrid:
        """Return the language tokens of an image of (height, width) pixels as a grid.

        It has as many tokens as `num_image_tokens` counts. Raises ValueError for a wrong size in pixels.
        """
        ...


@runtime_checkable
class ImageProcessingProvider(Protocol):
    """A model provider that knows the image processors of its family's Hugging Face folders."""

    def image_processing(self, config: Any, folder: str = "") -> ImageProcessing | None:
        """Describe how the model's images become pixels.

        Args:
            config: the family's flags.
            folder: a Hugging Face folder or its config.json; empty: the processor of the family.

        Returns:
            The description; None if the folder has no file that specifies it.

        Raises:
            ValueError: a file has a value that cannot be followed; the message names file, key and value.
        """
        ...

    def write_image_processing(self, config: Any, folder: Path, processing: ImageProcessing) -> str:
        """Make the files of an exported folder specify how the model was trained.

        Args:
            config: the family's flags.
            folder: folder of the exported config.json. It may have files of the model that training started from.
            processing: how images became pixels in training.

        Returns:
            A line for the user if no Hugging Face processor can do the same; files that would do something else are
            then removed. Empty if the files are right.
        """
        ...


@runtime_checkable
class ImageProcessorProvider(Protocol):
    """A model provider that can write the image processor of its models, which a rollout engine needs."""

    def check_processor(self, config: Any) -> None:
        """Raise ValueError, naming flags and values, if a model has no known image processor."""
        ...

    def write_processor(self, config: Any, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        """Write processor and tokenizer as Hugging Face saves them.

        Images have the size that the encoder takes, and come out as (value / 255 - mean) / std.

        Args:
            config: the family's flags.
            folder: folder of the model's config.json.
            mean: mean of each channel.
            std: standard deviation of each channel.
        """
        ...


@runtime_checkable
class VideoProcessorProvider(Protocol):
    """A model provider that can write the video processor of its models for a rollout engine, too."""

    def write_video_processor(self, config: Any, folder: Path, processing: VideoProcessing, tokenizer: Any) -> None:
        """Write the processor of videos whose frames have been chosen and resized before.

        Args:
            config: the family's flags.
            folder: folder of the model's config.json, in which `write_processor` has written.
            processing: normalisation of the frames, and limits of their pixels that no video exceeds.
            tokenizer: Hugging Face tokenizer of the prompts, which writes the times of frames.

        Raises:
            ValueError: the tokenizer has other special tokens than the model.
        """
        ...


@runtime_checkable
class VideoProvider(TokenGridProvider, Protocol):
    """A model provider whose encoder takes videos, too."""

    def video_token_ids(self, config: Any) -> dict[str, int]:
        """Return the placeholder token id of a video of each encoder module that takes videos."""
        ...

    def video_grid(self, config: Any, module: str, size: VideoSize) -> TokenGrid:
        """Return the language tokens of a video as a grid. Raises ValueError for a size that it cannot take."""
        ...


@runtime_checkable
class VideoProcessingProvider(Protocol):
    """A model provider that knows the video processors of its family's Hugging Face folders."""

    def video_processing(self, config: Any, folder: str = "") -> VideoProcessing | None:
        """Describe how the model's videos become pixels; arguments, result and errors as `image_processing`."""
        ...

    def write_video_processing(self, config: Any, folder: Path, processing: VideoProcessing) -> None:
        """Make the files of an exported folder specify how the model was trained; arguments as in the others."""
        ...


def pixel_shape(size: ImageSize, num_channels: int, tiles: Tiles | None = None) -> tuple[int, ...]:
    """Return the shape of the pixels of an image or a video, as `Sample.images` has them."""
    if isinstance(size, VideoSize):
        return size.frames, num_channels, *size[:2]
    return (num_channels, *size) if tiles is None else (tiles.count(*size), num_channels, *tiles.size)


def num_pictures(size: ImageSize, temporal_patch_size: int) -> int:
    """Count what an encoder takes as images: an image is one, a video as many as it has temporal patches."""
    return size.frames // temporal_patch_size if isinstance(size, VideoSize) else 1


def count_tokens(provider: ModelProvider, config: Any, module: str, height: int, width: int, frames: int = 0,
                 frame_seconds: float = 0.0) -> int:
    """Count the language tokens of an image, or of a video if there are frames. The last arguments are an `ImageSize`.

    Raises:
        ValueError: the encoder takes no such size, or no videos.
    """
    if not frames:
        return provider.num_image_tokens(config, module, height, width)
    return video_grid(provider, config, module, VideoSize(height, width, frames, frame_seconds)).size


def find_grid(provider: TokenGridProvider, config: Any, module: str, height: int, width: int, frames: int = 0,
              frame_seconds: float = 0.0) -> TokenGrid:
    """Return the tokens that `count_tokens` counts as a grid."""
    if not frames:
        return provider.token_grid(config, module, height, width)
    return video_grid(provider, config, module, VideoSize(height, width, frames, frame_seconds))


def video_grid(provider: Any, config: Any, module: str, size: VideoSize) -> TokenGrid:
    """Return the language tokens of a video as a grid. Raises ValueError if the family takes no videos."""
    if not isinstance(provider, VideoProvider):
        raise ValueError("the model takes images and no videos; --model-provider qwen2_5_vl and qwen3_vl do")
    return provider.video_grid(config, module, size)


@dataclass(frozen=True)
class TokenGrid:
    """Language tokens of an image or a video, frame by frame and row by row.

    Attributes:
        rows: rows of tokens.
        columns: tokens of a row.
        frames: frames in time; 1 for an image.
        frame_step: difference in time position between two frames.
    """

    rows: int
    columns: int
    frames: int = 1
    frame_step: float = 1.0

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.frames * self.rows * self.columns


def multimodal_positions(lengths: Sequence[int], images: Sequence[tuple[int, TokenGrid]]) -> np.ndarray:
    """Return the positions of the tokens of a row, as decoders of the Qwen-VL families rotate them.

    A text token has one position on all three axes. The tokens of an image share the time, and have their own row and
    column. Text after an image or a video continues one past the largest position on any axis, as in vLLM and in
    transformers up to 5.2. Later releases of transformers continue past a video by its height and width alone, which
    makes no difference for images.

    Args:
        lengths: tokens of each sequence of the row, in order.
        images: for each image, its first token's index in the row and its grid; in order. An image lies inside one
            sequence.

    Returns:
        Time, row and column of each token, int64 `[3, tokens]`. Each sequence starts at 0.
    """
    row = np.empty((NUM_AXES, sum(lengths)), np.int64)
    left = list(reversed(images))
    start = 0
    for length in lengths:
        position, index, stop = 0, start, start + length
        while index < stop:
            # Text up to the next image of the sequence, then the image.
            first = left[-1][0] if left and left[-1][0] < stop else stop
            row[:, index:first] = position + np.arange(first - index)
            position, index = position + first - index, first
            if first < stop:
                grid = left.pop()[1]
                row[:, first : first + grid.size] = position + grid_positions(grid)
                index = first + grid.size
                position = int(row[:, first:index].max()) + 1
        assert index == stop, f"an image ends at {index}, its sequence at {stop}"
        start = stop
    assert not left, f"images {left} lie behind the last sequence"
    return row


def grid_positions(grid: TokenGrid) -> np.ndarray:
    """Return time, row and column of the tokens of a grid, from 0, int64 `[3, tokens]`: frame by frame, row by row."""
    # In float64, where the product is exact. Rounded to float32 first, some times would floor to another position.
    times = np.floor(np.arange(grid.frames) * grid.frame_step).astype(np.int64)
    return np.stack([axis.ravel() for axis in np.meshgrid(
        times, np.arange(grid.rows), np.arange(grid.columns), indexing="ij")])
