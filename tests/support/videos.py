"""Short videos, written by PyAV: noise that moves, so that no two frames are equal."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import av
import numpy as np


def write_video(num_frames: int, height: int, width: int, rate: Fraction | int = 24, *, codec: str = "libx264",
                kind: str = "mp4", group: int = 12, turn: int = 0, sound: bool = False, seed: int = 0,
                options: dict[str, str] | None = None) -> bytes:
    """Return the content of a video file.

    Args:
        num_frames: frames.
        height: pixels of a frame's height; even, as codecs need it.
        width: pixels of its width; even.
        rate: frames a second.
        codec: encoder.
        kind: container.
        group: most frames from one that can be decoded alone to the next.
        turn: degrees by which players turn it.
        sound: whether it has a silent sound track.
        seed: of the noise.
        options: of the encoder.
    """
    buffer = io.BytesIO()
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    noise = blocks.repeat(8, 0).repeat(8, 1)[:height, :width]
    with _usual_priority():
        with av.open(buffer, "w", format=kind) as container:
            stream = container.add_stream(codec, rate=rate, options={"x265-params": "log-level=none", **(options or {})}
                                          if codec == "libx265" else options)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.codec_context.gop_size = group
            stream.codec_context.thread_count = 1
            if turn:
                stream.set_display_rotation(turn)
            track = container.add_stream("aac", rate=44100) if sound else None
            for number in range(num_frames):
                picture = np.roll(noise, 3 * number, 1)
                picture[: height // 4] = 5 * number % 256
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
            if track is not None:
                silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                silence.sample_rate = 44100
                container.mux(track.encode(silence))
                container.mux(track.encode())
    return buffer.getvalue()


@contextmanager
def _usual_priority() -> Iterator[None]:
    """Context after which this thread is scheduled as before.

    In a process of root, the encoder SVT-AV1 gives the thread that calls it the highest real-time priority. Every
    process that it starts would inherit that, and leave hardly any processor time to others.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def all_frames(content: bytes) -> np.ndarray:
    """Decode every frame in order, uint8 `[frames, height, width, 3]`, not turned."""
    with av.open(io.BytesIO(content)) as container:
        # With threads, processes that are forked later could not convert frames.
        return np.stack([frame.reformat(format="rgb24", threads=1).to_ndarray() for frame in container.decode(video=0)])
