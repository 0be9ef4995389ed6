"""Compare how many videos a second a data worker and the Qwen3-VL processor of transformers turn into pixels.

    python scripts/bench/videos.py [--videos 8] [--seconds 10] [--height 720] [--width 1280]

Both read one file for each video and decode H.264 with PyAV in one thread. They choose frames with the settings of the
published models, except for `--video-max-pixels`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import av
import numpy as np
import tyro

from data.video import plan_video, probe, read_frames, video_pixels
from providers.qwen3_vl import provider

RATE = 30
SIZE_MULTIPLE = 32


@dataclass(frozen=True)
class Flags:
    videos: int = 8
    """Number of videos."""
    seconds: int = 10
    """Length of each, at 30 frames a second."""
    height: int = 720
    """Pixels of a frame's height."""
    width: int = 1280
    """Pixels of a frame's width."""
    video_max_pixels: int = 20 * 448 * 448
    """Most pixels of all sampled frames of a video."""


def write_video(path: Path, flags: Flags, seed: int) -> None:
    """Write a video of a smooth picture that moves."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (flags.height // 8, flags.width // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.height, stream.width, stream.pix_fmt = *blocks.shape[:2], "yuv420p"
        for number in range(flags.seconds * RATE):
            frame = av.VideoFrame.from_ndarray(np.roll(blocks, 3 * number, 1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def measure(paths: list[Path], read: Callable[[Path], object]) -> float:
    """Return the videos that the better of two passes turns into pixels in a second of the CPU, all threads counted."""
    best = 0.0
    for _ in range(2):
        start = time.process_time()
        for path in paths:
            read(path)
        best = max(best, len(paths) / (time.process_time() - start))
    return best


def main(flags: Flags) -> None:
    import torch  # takes seconds, and --help does not need it
    from transformers import Qwen3VLVideoProcessor
    from transformers.video_utils import load_video

    torch.set_num_threads(1)
    processing = replace(provider.of_videos, max_pixels=flags.video_max_pixels)
    theirs = Qwen3VLVideoProcessor(
        size={"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
        cap_pixels_per_frame=False)

    def worker(path: Path) -> object:
        info = probe(path.name, path)
        plan = plan_video(info, processing, SIZE_MULTIPLE)
        return video_pixels(read_frames(path.name, path, info, plan.indices), plan, processing)

    def processor(path: Path) -> object:
        frames, metadata = load_video(str(path), backend="pyav", sample_indices_fn=theirs.sample_frames)
        return theirs(videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="np")

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.mp4" for number in range(flags.videos)]
        for number, path in enumerate(paths):
            write_video(path, flags, number)
        rates = {"data worker": measure(paths, worker), "transformers": measure(paths, processor)}
    for name, rate in rates.items():
        print(f"{name:<14}{rate:.2f} videos/s")
    print(f"{rates['data worker'] / rates['transformers']:.2f} times")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
