"""Read videos: size, length and rate from the container, the frames and pixels that the model gets from the content.

Frames and their size are those of the video processors of transformers. `Qwen2VLVideoProcessor` (rule qwen2_5_vl)
samples at a rate from the first frame on and limits the pixels of each frame. `Qwen3VLVideoProcessor` (rule qwen3_vl)
spreads as many frames over the whole video and limits the pixels of all of them together. The arithmetic is repeated
operation by operation, because rounding decides frames and sizes.

PyAV includes FFmpeg's libraries. torchcodec gives the same pixels at the same speed, but needs them on the host.
"""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.image_tiling import Size, check_ratio, smart_size, torch_resized
from mimo.protocols import VideoProcessing, VideoSize
from mimo.visual import Normalisation

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# Demuxers that read a single file. Others, such as those of playlists, would open further files or the network.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif"

# Containers without the time of each frame. FFmpeg numbers the packets of AVI in decoding order, and guesses times in
# program streams of MPEG.
UNTIMED_FORMATS = ("avi", "mpeg")
# Decoders that can be told, packet by packet, to leave out a frame on which no others depend.
SKIPPING_DECODERS = ("h264", "hevc", "mpeg4")
# Share of the context that `Qwen2VLVideoProcessor` gives to a video, and least room for growth above the fewest pixels.
CONTEXT_SHARE, GROWTH = 0.9, 1.05


@dataclass(frozen=True)
class VideoInfo:
    """Contents of a video file, known without decoding more than its first frame.

    Attributes:
        height: pixels of the upright picture.
        width: pixels of the upright picture.
        num_frames: frames in the file.
        rate: frames a second, on average.
        has_sound: whether there is sound beside the pictures.
        times: time stamp of each frame in the stream's own unit; empty if the file does not tell them.
        key_times: time stamps of the frames at which decoding can begin.
    """

    height: int
    width: int
    num_frames: int
    rate: float
    has_sound: bool
    times: tuple[int, ...]
    key_times: tuple[int, ...]


@contextmanager
def _opened(name: str, data: Any) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video. Raises ValueError, with its name, for errors of FFmpeg here and inside the block."""
    if not isinstance(data, (bytes, Path)):
        raise ValueError(f"video {name} is {type(data).__name__}, expected the bytes of a video file")
    if not (data if isinstance(data, bytes) else data.stat().st_size):
        raise ValueError(f"video {name} is empty")
    import av  # programs that read no video do not need it

    content = io.BytesIO(data) if isinstance(data, bytes) else str(data.resolve())
    try:
        with av.open(content, options={"format_whitelist": FORMATS}) as container:
            streams = [stream for stream in container.streams.video
                       if not stream.disposition & av.stream.Disposition.attached_pic]
            if not streams:
                raise ValueError(f"video {name} has no pictures")
            # Several workers share the cores, so threads of the decoder would get in each other's way.
            streams[0].thread_count = 1
            yield container, streams[0]
    except (av.FFmpegError, EOFError) as error:
        raise ValueError(f"undecodable video {name}: {error.strerror or error}") from error


def probe(name: str, data: Any) -> VideoInfo:
    """Return size, length and rate of a video, from its packets and its first frame.

    Args:
        name: name for messages.
        data: content of the file, or its path.

    Raises:
        ValueError: it is no video, or has no frame or no rate; the message names it.
    """
    with _opened(name, data) as (container, stream):
        times: list[int | None] = []
        key_times = []
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise ValueError(f"video {name} is cut off after {len(times)} frames")
            if packet.size and not packet.is_discard:  # an edit list may hide the first frames
                times.append(packet.pts)
                if packet.is_keyframe and packet.pts is not None:
                    key_times.append(packet.pts)
        if not times:
            raise ValueError(f"video {name} has no frame")
        container.seek(0)
        first = next(container.decode(stream), None)
        if first is None:
            raise ValueError(f"undecodable video {name}: its first frame cannot be decoded")
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise ValueError(f"video {name} does not say how many frames a second it has")
        height, width = (first.width, first.height) if first.rotation % 180 else (first.height, first.width)
        known = [time for time in times if time is not None]
        exact = len(set(known)) == len(times) and container.format.name not in UNTIMED_FORMATS
        return VideoInfo(height, width, len(times), float(rate), bool(container.streams.audio),
                         tuple(sorted(known)) if exact else (), tuple(sorted(key_times)) if exact else ())


def read_frames(name: str, data: Any, info: VideoInfo, indices: Sequence[int]) -> Iterator[np.ndarray]:
    """Decode some frames of a video, one at a time, and skip groups of pictures without any of them.

    Args:
        name: name for messages.
        data: content of the file, or its path.
        info: a result of `probe`.
        indices: numbers of the frames, in ascending order; a number may be repeated.

    Yields:
        Each frame upright, uint8 `[height, width, 3]`.

    Raises:
        ValueError: a frame cannot be decoded; the message names the video.
    """
    number_of = {time: number for number, time in enumerate(info.times)}
    wanted = {info.times[index] for index in indices} if info.times else set()
    with _opened(name, data) as (container, stream):
        frames, number, picture = _decoded(container, stream, wanted), -1, np.empty(0, np.uint8)
        for index in indices:
            if index != number:
                key = bisect_right(info.key_times, info.times[index]) - 1 if info.times else -1
                if key >= 0 and number_of[info.key_times[key]] > number + 1:
                    container.seek(info.key_times[key], stream=stream)
                    frames = _decoded(container, stream, wanted)
                number, frame = _decoded_until(frames, number_of, number, index)
                if number != index:  # the container's index is not exact
                    container.seek(0)
                    frames = _decoded(container, stream, wanted)
                    number, frame = _decoded_until(frames, number_of, -1, index)
                if number != index or frame.is_corrupt:
                    raise ValueError(f"undecodable video {name}: frame {index} of {info.num_frames} is damaged")
                # Data workers are forks, in which the threads of the conversion would be missing.
                colours = frame.reformat(format="rgb24", threads=1).to_ndarray()
                picture = np.rot90(colours, round(frame.rotation / 90))
                if picture.shape[:2] != (info.height, info.width):
                    raise ValueError(f"video {name} changes its size at frame {index}: {picture.shape[0]}x"
                                     f"{picture.shape[1]} pixels, before {info.height}x{info.width}")
            yield picture


def _decoded(container: InputContainer, stream: VideoStream, wanted: set[int]) -> Iterator[VideoFrame]:
    """Decode all frames from here on, except those that are neither wanted nor needed to decode others.

    Args:
        container: the video.
        stream: its pictures.
        wanted: time stamps of the wanted frames; empty: all.
    """
    can_skip = wanted and stream.codec_context.name in SKIPPING_DECODERS
    for packet in container.demux(stream):
        if can_skip:
            is_needed = not packet.size or packet.pts in wanted
            stream.codec_context.skip_frame = "DEFAULT" if is_needed else "NONREF"
        yield from packet.decode()


def _decoded_until(frames: Iterator[VideoFrame], number_of: dict[int, int], number: int, index: int) -> (
        tuple[int, Any]):
    """Return number and picture of the first frame from number `index` on; the number is -1 at the end of the video.

    Args:
        frames: the frames after frame `number`.
        number_of: number of a frame by its time; empty if the file has no times, and then no frame is left out.
        number: number of the frame before `frames`.
        index: the wanted number.
    """
    for frame in frames:
        number = number_of.get(frame.pts, -1) if number_of else number + 1
        if number >= index:
            return number, frame
    return -1, None


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
