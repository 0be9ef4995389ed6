"""Videos: exact frames of every container, what is refused, and the frames and sizes that transformers chooses."""

from __future__ import annotations

import os
import re
from fractions import Fraction

import numpy as np
import pytest

from data.video import probe, read_frames
from tests.support.marks import fast_only
from tests.support.videos import all_frames, write_video

KINDS = [("libx264", "mp4", 12), ("libx264", "mp4", 2), ("libx264", "matroska", 250), ("mpeg4", "avi", 5),
         ("libvpx-vp9", "webm", 10), ("libx265", "mp4", 12), ("libx264", "mpegts", 12), ("mpeg4", "mp4", 1),
         ("libsvtav1", "mp4", 12), ("flv", "flv", 5), ("libx264", "avi", 12), ("mpeg1video", "mpeg", 12)]


@pytest.mark.parametrize(("codec", "kind", "group"), fast_only(KINDS[:5], KINDS))
def test_frames_are_found_by_their_number(tmp_path, codec, kind, group):
    content = write_video(40, 48, 64, 25, codec=codec, kind=kind, group=group)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER  # Else all later tests would run at the encoder's priority.
    (tmp_path / "video").write_bytes(content)
    expected = all_frames(content)
    for data in (content, tmp_path / "video"):
        info = probe("a", data)
        assert (info.height, info.width, info.num_frames, info.rate) == (48, 64, 40, 25)
        for indices in ([0, 10, 20, 39], [39], list(range(40)), [0, 0, 7, 7, 30], [37, 38]):
            found = list(read_frames("a", data, info, indices))
            assert np.array_equal(found, expected[indices]), (kind, indices)


def test_a_video_is_turned_upright():
    content = write_video(4, 32, 64, turn=90)
    info = probe("a", content)
    assert (info.height, info.width) == (64, 32)
    (found,) = read_frames("a", content, info, [2])
    assert np.array_equal(found, np.rot90(all_frames(content)[2]))


def test_rate_and_sound_are_known():
    info = probe("a", write_video(30, 32, 32, Fraction(30000, 1001), sound=True))
    assert info.has_sound and info.rate == pytest.approx(30000 / 1001) and info.num_frames == 30


@pytest.mark.parametrize(("content", "message"), [
    (b"", "video a is empty"),
    ("a.mp4", "video a is str, expected the bytes of a video file"),
    (b"no video" * 100, "undecodable video a: Invalid data found"),
    # A playlist would have other files opened.
    (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n", "undecodable video a: Invalid data found"),
    (write_video(40, 48, 64)[:800], "undecodable video a: Invalid data found"),
    (write_video(1, 48, 64, sound=True, codec="libx264")[:0] + b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0"
     b"\x80\x3e\0\0\2\0\x10\0data\0\0\0\0", "undecodable video a"),
])
def test_files_that_are_no_videos_are_refused(content, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        probe("a", content)


def test_a_video_that_breaks_off_or_is_damaged_is_refused():
    content = write_video(40, 48, 64, options={"movflags": "faststart"})
    with pytest.raises(ValueError, match="undecodable video a|video a is cut off"):
        probe("a", write_video(40, 48, 64, kind="mp4")[: len(content) // 2])
    damaged = bytearray(write_video(60, 96, 96, codec="mpeg4", kind="avi", group=60))
    middle = len(damaged) // 2
    damaged[middle : middle + 3000] = bytes(np.random.default_rng(0).integers(0, 256, 3000, np.uint8))
    with pytest.raises(ValueError, match="video a"):
        info = probe("a", bytes(damaged))
        list(read_frames("a", bytes(damaged), info, range(info.num_frames)))
