"""scripts/stage.py: copies once, goes on after a kill, gives up what hangs, tells all processes of a node."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import ROOT
from tests.support.small_servers import COMMIT, small_hub

MB = 10**6
STAGE = ROOT / "scripts" / "stage.py"


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(STAGE), *map(str, arguments)], text=True, env=os.environ | environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a process to end with this code, and return stderr, then stdout."""
    out, said = process.communicate(timeout=60)
    assert process.returncode == code, said + out
    return said + out


def stage(*arguments: object, code: int = 0, **environment: str) -> str:
    return end(start(*arguments, **environment), code)


def wait_for(condition, what: str) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, f"{what} did not come"
        time.sleep(0.01)


def write(path: Path, size: int = 1000, seed: int = 1) -> bytes:
    data = (f"{seed:03d} {path.name}\n".encode() * (size // 4))[:size]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return data


def parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob(".stage-*.part"))


@pytest.fixture
def model(tmp_path):
    """A folder as the cache of the Hub has them: its files are links to others."""
    for name in ("config.json", "weights/one.safetensors", "weights/two.safetensors"):
        write(tmp_path / "blobs" / name.replace("/", "-"))
        link = tmp_path / "model" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tmp_path / "blobs" / name.replace("/", "-"))
    (tmp_path / "blobs" / "config.json").chmod(0o640)
    return tmp_path / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_folder_of_links_becomes_files_once(tmp_path, model):
    first = stage(model, "--to", tmp_path / "disk")
    assert re.search(r"disk: 3 files copied \(3e-06 GB\), 0 already there \(0\.00 GB\), \d+\.\d s\n$", first)
    copy = tmp_path / "disk" / "model"
    assert contents(copy) == contents(model) and not any(path.is_symlink() for path in copy.rglob("*"))
    assert (copy / "config.json").stat().st_mode & 0o777 == 0o640
    inodes = {path: path.stat().st_ino for path in copy.rglob("*")}
    assert "0 files copied (0.00 GB), 3 already there (3e-06 GB)" in stage(model, "--to", tmp_path / "disk")
    assert {path: path.stat().st_ino for path in copy.rglob("*")} == inodes
    # The record is a help, not a condition: size and time are enough.
    (tmp_path / "disk" / ".staged.json").unlink()
    assert "0 files copied" in stage(model, "--to", tmp_path / "disk")


def test_the_path_alone_is_printed_for_scripts(tmp_path, model):
    single = tmp_path / "one.jsonl"
    write(single)
    process = start(model, single, "--to", tmp_path / "disk", "--print-path")
    out, said = process.communicate(timeout=60)
    assert out == f"{tmp_path}/disk/model\n{tmp_path}/disk/one.jsonl\n" and "4 files copied" in said
    assert (tmp_path / "disk" / "one.jsonl").read_bytes() == single.read_bytes()


def test_a_changed_source_is_copied_again_and_a_removed_one_is_removed(tmp_path, model):
    stage(model, "--to", tmp_path / "disk")
    changed = write(tmp_path / "blobs" / "config.json", seed=2)  # as long as before
    (model / "weights" / "one.safetensors").unlink()
    write(tmp_path / "disk" / "model" / "mine.txt")
    said = stage(model, "--to", tmp_path / "disk")
    assert "1 file copied" in said and "1 already there" in said and "1 removed" in said
    copy = contents(tmp_path / "disk" / "model")
    assert copy["config.json"] == changed
    assert copy.keys() == {"config.json", "mine.txt", "weights/two.safetensors"}, "what others put there stays"


def test_patterns_choose_and_add_up(tmp_path, model):
    stage(model, "--to", tmp_path / "disk", "--include", "*.json")
    assert contents(tmp_path / "disk" / "model").keys() == {"config.json"}
    assert not (tmp_path / "disk" / "model" / "weights").exists()
    assert "2 files to copy" in stage(model, "--to", tmp_path / "disk", "--dry-run", "--include", "weights/*")
    assert contents(tmp_path / "disk" / "model").keys() == {"config.json"}
    stage(model, "--to", tmp_path / "disk", "--include", "weights/one*")
    assert contents(tmp_path / "disk" / "model").keys() == {"config.json", "weights/one.safetensors"}
    said = stage(model, "--to", tmp_path / "disk", "--include", "*.bin", code=1)
    assert f"{model}: has 3 files, none of them for --include *.bin" in said


def test_checksums_find_what_size_and_time_do_not(tmp_path, model):
    stage(model, "--to", tmp_path / "disk")
    damaged = tmp_path / "disk" / "model" / "weights" / "one.safetensors"
    times = damaged.stat()
    write(damaged, seed=9)
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "0 files copied" in stage(model, "--to", tmp_path / "disk")
    said = stage(model, "--to", tmp_path / "disk", "--verify")
    assert f"{damaged} differs from {model}/weights/one.safetensors" in said and "1 file copied" in said
    assert contents(tmp_path / "disk" / "model") == contents(model)
    # Without a record, those of the source as it is now.
    write(damaged, seed=9)
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "disk" / ".staged.json").unlink()
    assert "1 file copied" in stage(model, "--to", tmp_path / "disk", "--verify")
    assert contents(tmp_path / "disk" / "model") == contents(model)


def slow(source: Path, folder: Path) -> subprocess.Popen[str]:
    """Return a copy of 10 MB that takes seconds, after more than 4 MB of it."""
    process = start(source, "--to", folder, "--workers", 1, "--limit-mb-s", 5, "--block-mib", 1)
    wait_for(lambda: any(part.stat().st_size > 4 * MB for part in parts(folder)), "half a file")
    return process


def test_a_copy_that_is_killed_goes_on_where_it_stopped(tmp_path):
    data = write(tmp_path / "model" / "weights", 10 * MB)
    process = slow(tmp_path / "model", tmp_path / "disk")
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    end(process, -signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes(),
             "the end of the process that copied")
    (part,) = parts(tmp_path / "disk")
    assert not (tmp_path / "disk" / "model" / "weights").exists()
    kept = (part.stat().st_size // (1 << 20) - 1) << 20
    assert kept > 2 * MB
    # The kept part is not read again: with another beginning the copy has that beginning.
    with part.open("r+b") as stream:
        stream.write(b"kept")
    said = stage(tmp_path / "model", "--to", tmp_path / "disk", "--block-mib", 1)
    assert f"continued after the {kept / 1e9:.3g} GB of an interrupted copy" in said
    assert (tmp_path / "disk" / "model" / "weights").read_bytes() == b"kept" + data[4:]
    assert parts(tmp_path / "disk") == []


def test_a_part_of_an_older_source_is_not_used(tmp_path):
    write(tmp_path / "model" / "weights", 10 * MB)
    process = slow(tmp_path / "model", tmp_path / "disk")
    process.send_signal(signal.SIGKILL)
    end(process, -signal.SIGKILL)
    data = write(tmp_path / "model" / "weights", 10 * MB, seed=2)
    assert "interrupted copy" not in stage(tmp_path / "model", "--to", tmp_path / "disk", "--block-mib", 1)
    assert (tmp_path / "disk" / "model" / "weights").read_bytes() == data and parts(tmp_path / "disk") == []


def test_a_source_that_changes_while_it_is_copied_is_named(tmp_path):
    write(tmp_path / "model" / "weights", 10 * MB)
    process = slow(tmp_path / "model", tmp_path / "disk")
    os.utime(tmp_path / "model" / "weights")
    assert f"{tmp_path}/model/weights changed while it was copied" in end(process, 1)
    assert not (tmp_path / "disk" / "model" / "weights").exists()


def test_only_one_of_two_processes_copies(tmp_path):
    data = write(tmp_path / "model" / "weights", 10 * MB)
    first = slow(tmp_path / "model", tmp_path / "disk")
    second = stage(tmp_path / "model", "--to", tmp_path / "disk")
    assert f"process {first.pid} of this node stages into" in second
    assert "0 files copied (0.00 GB), 1 already there (0.01 GB)" in second
    assert "1 file copied (0.01 GB)" in end(first)
    assert (tmp_path / "disk" / "model" / "weights").read_bytes() == data


def test_waiting_processes_learn_of_a_failure(tmp_path):
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "stuck")
    stuck = (tmp_path / "model", "--to", tmp_path / "disk", "--retries", 0, "--timeout-s")
    first = start(*stuck, 3)
    wait_for(lambda: str(first.pid) in read(tmp_path / "disk" / ".stage.lock"), "the first process")
    others = [start(*stuck, 50) for _ in range(2)]
    reason = f"{tmp_path}/model/stuck: no progress for 3 s"
    assert reason in end(first, 1)
    for other in others:
        assert f"process {first.pid} of this node failed: {reason}" in end(other, 1)


def test_the_work_of_a_process_that_is_killed_is_done_by_one_that_waits(tmp_path):
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "stuck")
    first = start(tmp_path / "model", "--to", tmp_path / "disk")
    wait_for(lambda: str(first.pid) in read(tmp_path / "disk" / ".stage.lock"), "the first process")
    second = start(tmp_path / "model", "--to", tmp_path / "disk")
    assert "waiting" in second.stderr.readline()
    (tmp_path / "model" / "stuck").unlink()
    write(tmp_path / "model" / "weights")
    first.send_signal(signal.SIGKILL)
    assert "1 file copied" in end(second)
    end(first, -signal.SIGKILL)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_file_that_hangs_is_named_and_the_others_are_kept(tmp_path, model):
    os.mkfifo(model / "stuck")
    said = stage(model, "--to", tmp_path / "disk", "--timeout-s", "0.5", "--retries", 1, code=1)
    assert f"{model}/stuck: no progress for 0.5 s: trying again" in said
    assert said.endswith(f"error: {model}/stuck: no progress for 0.5 s, 2 times\n")
    (model / "stuck").unlink()
    assert "0 files copied (0.00 GB), 3 already there" in stage(model, "--to", tmp_path / "disk")


def test_too_little_space_is_said_before_anything_is_copied(tmp_path, model):
    with (model / "huge").open("wb") as stream:
        stream.truncate(15 << 40)  # holes alone
    said = stage(model, "--to", tmp_path / "disk", code=1)
    assert re.search(rf"{tmp_path}/disk: 16492\.67 GB to copy, \d+\.\d\d GB free\n$", said)
    assert not (tmp_path / "disk" / "model").exists()


def test_mistakes_are_named(tmp_path, model):
    disk = tmp_path / "disk"
    assert f"{tmp_path}/nowhere: No such file or directory" in stage(tmp_path / "nowhere", "--to", disk, code=1)
    write(tmp_path / "other" / "model" / "x")
    assert "would both become" in stage(model, tmp_path / "other" / "model", "--to", disk, code=2)
    assert "--timeout-s 0 is too small" in stage(model, "--to", disk, "--timeout-s", 0, code=2)
    assert "hf://one: write hf://organisation/name" in stage("hf://one", "--to", disk, code=2)
    assert "contain each other" in stage(model, "--to", tmp_path, code=1)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model").symlink_to(model)
    assert "linked/model is a link" in stage(model, "--to", tmp_path / "linked", code=1)
    (model / "lost").symlink_to("nowhere")
    assert f"{model}/lost is a link to nowhere, which is not there" in stage(model, "--to", disk, code=1)
    (model / "lost").unlink()
    (model / "around").symlink_to(model)
    assert f"{model}/around is a link to a folder that it lies in" in stage(model, "--to", disk, code=1)
    (disk / ".staged.json").write_text("{")
    assert ".staged.json is damaged" in stage(model, "--to", disk, code=1)


def test_a_cache_of_all_revisions_is_refused(tmp_path):
    for name in ("blobs", "refs", "snapshots/abc"):
        (tmp_path / "models--org--name" / name).mkdir(parents=True)
    said = stage(tmp_path / "models--org--name", "--to", tmp_path / "disk", code=1)
    assert f"give the folder of one: {tmp_path}/models--org--name/snapshots/abc" in said


@pytest.mark.slow
def test_a_model_of_the_hub_at_one_commit(tmp_path):
    files = {"config.json": b"{}", "weights/one.safetensors": b"one" * 1000, "other.bin": b"x"}
    disk, include = tmp_path / "disk", ("--include", "*.json", "--include", "*.safetensors")
    with small_hub(files) as (address, asked):
        hub = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        said = stage("hf://org/small", "--to", disk, *include, "--print-path", **hub)
        assert "2 files copied" in said and said.endswith(f"\n{disk}/small\n")
        assert (disk / "small" / "weights" / "one.safetensors").read_bytes() == files["weights/one.safetensors"]
        assert not (disk / "small" / "other.bin").exists()
        assert json.loads((disk / ".staged.json").read_text())["places"]["small"]["source"].endswith(f"@{COMMIT}")
        # A branch is looked up; a commit that is there needs nobody.
        downloads = sum("/resolve/" in path for path in asked)
        assert "0 files copied" in stage("hf://org/small", "--to", disk, *include, **hub)
        assert sum("/resolve/" in path for path in asked) == downloads
        asked.clear()
        assert "0 files copied" in stage(f"hf://org/small@{COMMIT}", "--to", disk, *include, **hub)
        assert asked == []
        assert "hf://org/none: RepositoryNotFoundError: " in stage("hf://org/none", "--to", disk, code=1, **hub)
    said = stage("hf://org/small", "--to", disk, *include, code=1, **hub)
    assert f"the Hub at {address} cannot be reached from here" in said
    assert f"hf://org/small@{COMMIT} is staged and needs no network" in said
    offline = hub | {"HF_HUB_OFFLINE": "1"}
    assert "0 files copied" in stage(f"hf://org/small@{COMMIT}", "--to", disk, *include, **offline)
    assert "HF_HUB_OFFLINE is set" in stage("hf://org/small", "--to", disk, *include, code=1, **offline)
