"""Choose the frames of a video and their size as the video processors of transformers do, and make their pixels.

`Qwen2VLVideoProcessor` (rule qwen2_5_vl) samples at a rate from the first frame on and limits the pixels of each frame.
`Qwen3VLVideoProcessor` (rule qwen3_vl) spreads as many frames over the whole video and limits the pixels of all of them
together. The arithmetic is repeated operation by operation, because rounding decides frames and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.image_tiling import Size, check_ratio, smart_size, torch_resized
from mimo.protocols import VideoProcessing, VideoSize
from mimo.visual import Normalisation

if TYPE_CHECKING:
    from data.video import VideoInfo

# Share of the context that `Qwen2VLVideoProcessor` gives to a video, and least room for growth above the fewest pixels.
CONTEXT_SHARE, GROWTH = 0.9, 1.05


@dataclass(frozen=True)
class VideoPlan:
    """Frames of a video that the model gets.

    Attributes:
        indices: number of each frame in the file, ascending; the last is repeated up to a whole temporal patch.
        num_sampled: frames without these repetitions.
        sizes: size of each placeholder's part of the video.
        texts: text before each placeholder.
    """

    indices: tuple[int, ...]
    num_sampled: int
    sizes: tuple[VideoSize, ...]
    texts: tuple[str, ...]


def plan_video(info: VideoInfo, processing: VideoProcessing, size_multiple: int, *,
               is_sampled: bool = False) -> VideoPlan:
    """Choose the frames of a video and their size.

    Args:
        info: size, length and rate of the video.
        processing: the model's video processing.
        size_multiple: divides height and width of a frame.
        is_sampled: whether all frames are taken, because they have been chosen before.

    Raises:
        ValueError: the video is too short, or its frames are too narrow.
    """
    indices = list(range(info.num_frames)) if is_sampled else sample_frames(info.num_frames, info.rate, processing)
    height, width = frame_size(len(indices), info.height, info.width, processing, size_multiple)
    patch = processing.temporal_patch_size
    # transformers takes the rate of the sampled frames before the last one is repeated.
    sampled = len(indices)
    frame_seconds = 1 / (sampled / info.num_frames * info.rate)
    indices += [indices[-1]] * (-len(indices) % patch)
    if not processing.timestamps:
        return VideoPlan(tuple(indices), sampled, (VideoSize(height, width, len(indices), frame_seconds),), ("",))
    times = [index / info.rate for index in indices]
    middles = [(times[at] + times[at + patch - 1]) / 2 for at in range(0, len(times), patch)]
    return VideoPlan(tuple(indices), sampled, (VideoSize(height, width, patch),) * len(middles),
                     tuple(f"<{middle:.1f} seconds>" for middle in middles))


def sample_frames(count: int, rate: float, processing: VideoProcessing) -> list[int]:
    """Return the numbers of the sampled frames of a video of `count` frames, `rate` of them a second.

    Raises:
        ValueError: it has too few frames.
    """
    if not processing.fps and not processing.num_frames:
        return list(range(count))
    if processing.rule == "qwen3_vl":
        number = processing.num_frames
        if not number:
            number = min(max(int(count / rate * processing.fps), processing.min_frames), processing.max_frames, count)
        chosen: list[int] = np.linspace(0, count - 1, number).round().astype(int).tolist()
        return chosen
    patch = processing.temporal_patch_size
    if processing.num_frames:
        number = round(processing.num_frames / patch) * patch
    else:
        most = math.floor(min(processing.max_frames, count) / patch) * patch
        number = math.floor(min(max(count / rate * processing.fps, processing.min_frames), most, count) / patch) * patch
    if not 0 < number <= count:
        raise ValueError(f"is too short: it has {count} frames, and {number or patch} are sampled")
    import torch  # its arithmetic in float32 decides some frames

    return torch.arange(0, count, count / number).int().tolist()[:number]


def frame_size(count: int, height: int, width: int, processing: VideoProcessing, size_multiple: int) -> Size:
    """Return height and width in pixels to which the frames of a video are resized.

    Args:
        count: number of sampled frames.
        height: height of a frame in the file, in pixels.
        width: width of a frame in the file, in pixels.
        processing: the model's video processing.
        size_multiple: divides both sides of the result.

    Raises:
        ValueError: there are too few frames, or they are too narrow.
    """
    least, most, patch = processing.min_pixels, processing.max_pixels, processing.temporal_patch_size
    floor = int(least * GROWTH)
    if processing.rule == "qwen2_5_vl":
        if processing.max_tokens:
            total = int(processing.max_tokens * size_multiple**2 * CONTEXT_SHARE)
            most = max(min(most, total * patch // count), floor)
        return smart_size(height, width, size_multiple, least, most)
    if count < patch:
        raise ValueError(f"is too short: it has {count} frame, and the model takes {patch} at a time")
    if processing.max_tokens:
        most = max(min(processing.max_tokens * size_multiple**2, most // count), floor) * count
    if height < size_multiple or width < size_multiple:
        scale = max(size_multiple / height, size_multiple / width)
        height, width = int(height * scale), int(width * scale)
    check_ratio(height, width)
    rows, columns = (round(side / size_multiple) * size_multiple for side in (height, width))
    frames = round(count / patch) * patch
    if frames * rows * columns > most:
        scale = math.sqrt((count * height * width) / most)
        rows, columns = (max(size_multiple, math.floor(side / scale / size_multiple) * size_multiple)
                         for side in (height, width))
    elif frames * rows * columns < least:
        scale = math.sqrt(least / (count * height * width))
        rows, columns = (math.ceil(side * scale / size_multiple) * size_multiple for side in (height, width))
    return rows, columns


def video_pixels(frames: Iterable[np.ndarray], plan: VideoPlan, processing: VideoProcessing, *,
                 normalise: bool = True) -> list[np.ndarray]:
    """Resize the frames of a video, and normalise them.

    Args:
        frames: uint8 `[height, width, channels]`, one for each of the plan's indices.
        plan: a result of `plan_video`.
        processing: the model's video processing.
        normalise: whether to normalise. If not, the encoder's rank does.

    Returns:
        `[frames, channels, height, width]` for each placeholder, float32 if they are normalised and else uint8.
    """
    normalisation, size = Normalisation(processing.mean, processing.std), plan.sizes[0][:2]
    pixels = np.empty((len(plan.indices), len(processing.mean), *size), np.float32 if normalise else np.uint8)
    for position, frame in enumerate(frames):
        levels = torch_resized(np.ascontiguousarray(frame), size, processing.resample).transpose(2, 0, 1)
        pixels[position] = normalisation.normalise(levels) if normalise else levels
    return np.split(pixels, np.cumsum([part.frames for part in plan.sizes])[:-1])
