"""Read videos: their size, length and rate from the container, chosen frames from the content.

PyAV includes FFmpeg's libraries. torchcodec gives the same pixels at the same speed, but needs them on the host.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# Demuxers that read a single file. Others, such as those of playlists, would open further files or the network.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif"

# Decoders that can be told, packet by packet, to leave out a frame on which no others depend.
SKIPPING_DECODERS = ("h264", "hevc", "mpeg4")


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
        exact = len(set(known)) == len(times)
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
