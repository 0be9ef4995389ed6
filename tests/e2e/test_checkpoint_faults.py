"""Checkpoints when things go wrong, through the command: kills, full disks, damage, a stop in the middle of a save."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mimo.checkpoint import paths
from tests.support.launch import ROOT, find_worker, finish, losses, start_torchrun, torchrun

pytestmark = pytest.mark.slow

TINY = """--model-provider mock --device cpu --no-bf16 --seq-length 64 --global-batch-size 2 --watchdog-timeout-s 60
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --vocab-size 96
--image-token-id 95 --vision-num-layers 1 --vision-hidden-size 32 --vision-num-attention-heads 4
--vision-ffn-hidden-size 64 --vision-image-size 16 --vision-patch-size 8 --lr-decay-style constant --log-interval 1
--dataset-provider tests.support.disk:provider""".split()
FOREVER = ("--train-iters", "100000")
ALONE = ("--layout", "colocated")
ENDS_WITHIN_S = 200.0
# More iterations than any test here trains.
WHOLE = 60


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith(("error", "stall"))]


def wait_for(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    """Wait until the condition holds. The process must run until then."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise AssertionError(process.communicate()[0][-3000:])
        time.sleep(0.002)


def kill_all(process: subprocess.Popen[str], num_ranks: int) -> None:
    """SIGKILL to the launcher and every rank, the launcher first: it must not report for them."""
    ranks = [find_worker(process.pid, rank) for rank in range(num_ranks)]
    for pid in (process.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def saved(root: Path) -> int:
    """Return the iteration that the tracker names; 0 without one."""
    return int(paths.latest(root) or 0) if root.is_dir() else 0


def contents(root: Path) -> dict[str, bytes]:
    """List the files below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def run(run_dir: Path, *flags: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return torchrun(num_ranks, *TINY, *flags, "--run-dir", str(run_dir), timeout_s=ENDS_WITHIN_S)


def train_on(tmp_path: Path, root: Path, until: int, *flags: str, num_ranks: int = 2) -> list[float]:
    """Go on from the checkpoints in `root` as a requeued job does, to iteration `until`; gives the losses."""
    done = run(tmp_path / "rest", "--train-iters", str(until), "--save", str(root), "--load", str(root), *flags,
               num_ranks=num_ranks)
    assert done.returncode == 0, done.stdout[-3000:]
    assert saved(root) == until
    return losses(tmp_path / "rest")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder, "--train-iters", str(WHOLE))
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(folder)


# Killed and started again with the same flags, as Slurm does with a requeued job

@pytest.mark.parametrize("mode", [(), ("--async-save",)], ids=["sync", "async"])
def test_a_killed_run_goes_on_when_it_is_started_again(tmp_path, mode, uninterrupted):
    root, generator = tmp_path / "checkpoints", random.Random(3)
    flags = (*TINY, *FOREVER, *mode, "--save", str(root), "--load", str(root), "--save-interval", "1",
             "--keep-last", "2")
    ends = []
    for start in range(2):
        run_dir = tmp_path / f"start{start}"
        process = start_torchrun(2, *flags, "--run-dir", str(run_dir))
        before = saved(root)
        wait_for(process, lambda before=before: saved(root) > before + 1 and list(root.glob(".saving_*")))
        time.sleep(generator.random() * 0.05)
        kill_all(process, 2)
        assert len(list(root.glob("iter_*"))) == len(paths.saved_iterations(root)) > 0
        assert saved(root) in paths.saved_iterations(root)
        ends.append(saved(root))
    found = losses(tmp_path / "start0")[:ends[0]]
    assert len(found) == ends[0], "the first start was a fresh one"
    found += losses(tmp_path / "start1")[:ends[1] - ends[0]]
    found += train_on(tmp_path, root, ends[1] + 2)
    assert found == uninterrupted[:ends[1] + 2]


def test_a_second_run_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    flags = (*FOREVER, *ALONE, "--save", str(root), "--load", str(root), "--save-interval", "1", "--keep-last", "2")
    process = start_torchrun(1, *TINY, *flags, "--run-dir", str(tmp_path / "first"))
    wait_for(process, lambda: saved(root) > 0)
    rank = find_worker(process.pid, 0)
    done = run(tmp_path / "second", *flags, num_ranks=1)
    assert done.returncode != 0
    assert f"--save {root}: another run saves there (process {rank} on " in done.stdout, done.stdout[-3000:]
    assert not (tmp_path / "second" / "metrics.jsonl").exists() and process.poll() is None
    kill_all(process, 1)
    train_on(tmp_path, root, saved(root) + 1, *ALONE, num_ranks=1)
    assert not (root / ".lock").exists()


# A disk without space

FULL = [pytest.param("__1_0.distcp", ("--async-save",), 1, id="shard-async"),
        pytest.param("__1_0.distcp", (), 1, id="shard"), pytest.param(".metadata", (), 0, id="index"),
        pytest.param("common.pt", ("--async-save",), 0, id="common-async")]


@pytest.mark.parametrize(("file", "mode", "rank"), FULL)
def test_a_full_disk(tmp_path: Path, file: str, mode: tuple[str, ...], rank: int) -> None:
    """The kernel refuses the bytes of one file of the second save."""
    root = tmp_path / "checkpoints"
    done = run(tmp_path / "run", *FOREVER, *mode, "--save", str(root), "--save-interval", "2", "--full-at", "4",
               "--full-file", file)
    assert done.returncode != 0
    (error,) = errors_of(done)
    assert error.startswith(f"error on rank {rank} (")
    told = f"--save {root}: rank {rank} could not save iteration 4: OSError: [Errno 28] No space left on device"
    assert f"ValueError: {told}; the last complete checkpoint is that of iteration 2" in error, error
    assert saved(root) == 2
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000002", paths.TRACKER]
    assert len(train_on(tmp_path, root, 3)) == 1


def test_a_full_file_system(tmp_path: Path) -> None:
    """A real one with room for one checkpoint. Who is not root mounts it in a namespace of its own."""
    root = tmp_path / "small"
    root.mkdir()
    inside = f"mount -t tmpfs -o size=1600k tmpfs {root} && exec \"$@\""
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    possible = subprocess.run([*namespace, inside, "sh", "true"], check=False, capture_output=True, text=True)
    if possible.returncode:
        pytest.skip(f"no file system may be mounted here: {possible.stderr.strip()}")
    keep = f"{inside.replace('exec ', '')}; code=$?; cp -r {root} {tmp_path}/kept; exit $code"
    command = [*namespace, keep, "sh", sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", str(ROOT / "train_hetero.py"), *TINY, *FOREVER, "--save", str(root),
               "--save-interval", "2", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, check=False, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=ENDS_WITHIN_S, env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    kept = tmp_path / "kept"
    assert done.returncode != 0
    (error,) = errors_of(done)
    told = rf"--save {root}: rank \d could not save iteration (\d): OSError: \[Errno 28\] No space left on device"
    match = re.search(told, error)
    assert match is not None, error
    last = int(match[1]) - 2
    assert error.endswith(f"; the last complete checkpoint is that of iteration {last}") and saved(kept) == last > 0
    assert not list(kept.glob(".saving_*")), "what the failed save has written is gone"
    assert len(train_on(tmp_path, kept, last + 1)) == 1


# Files that are gone or short, folders that cannot be written

def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def missing_and_truncated(folder: Path) -> None:
    remove("__0_0.distcp")(folder)
    os.truncate(folder / "__0_1.distcp", (folder / "__0_1.distcp").stat().st_size - 100)


DAMAGE = {
    "shards": (missing_and_truncated, (r"__0_0\.distcp cannot be read \(No such file or directory\); it holds ",
                                       r"\S+ in __0_1\.distcp: the file ends \d+ bytes early")),
    "index": (remove(".metadata"), (r"iter_0000001 is not a checkpoint: it has no \.metadata",)),
    "metadata": (remove("metadata.json"), (r"iter_0000001, which is not complete, it has no metadata\.json",)),
}


@pytest.fixture(scope="module")
def one_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("one")
    train_on(tmp_path_factory.mktemp("run"), root, 1, *ALONE, num_ranks=1)
    return root


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path: Path, one_checkpoint: Path, kind: str) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(one_checkpoint, root)
    damage, messages = DAMAGE[kind]
    damage(root / "iter_0000001")
    before = contents(root)
    done = run(tmp_path / "run", *FOREVER, *ALONE, "--save", str(root), "--load", str(root), num_ranks=1)
    assert done.returncode != 0
    assert len(errors_of(done)) == 1, errors_of(done)
    for message in messages:
        assert re.search(message, done.stdout), done.stdout[-3000:]
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "nothing was trained"
    assert contents(root) == before


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """Root may write anywhere, so a file stands where a folder is wanted."""
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "checkpoints"
    done = run(tmp_path / "run", *FOREVER, "--save", str(root))
    assert done.returncode != 0
    (error,) = errors_of(done)
    assert f"--save {root}: cannot be written: " in error and "Not a directory" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "nothing was trained"


# Told to stop: save, exit with 0

def in_a_save(root: Path) -> bool:
    return saved(root) > 0 and bool(list(root.glob(".saving_*/__0_0.distcp")))


STOPS = {
    "training": ((), lambda root, run_dir: len(read(run_dir)) > 2),
    "sync save": (("--save-interval", "3", "--fsync-s", "0.3"), lambda root, run_dir: in_a_save(root)),
    "async save": (("--save-interval", "3", "--fsync-s", "0.3", "--async-save"), lambda root, run_dir: in_a_save(root)),
}


def read(run_dir: Path) -> list[float]:
    return losses(run_dir) if (run_dir / "metrics.jsonl").exists() else []


@pytest.mark.parametrize("during", STOPS)
def test_sigterm_saves_and_exits(tmp_path: Path, during: str, uninterrupted: list[float]) -> None:
    root, run_dir = tmp_path / "checkpoints", tmp_path / "run"
    flags, reached = STOPS[during]
    process = start_torchrun(2, *TINY, *FOREVER, *flags, "--save", str(root), "--run-dir", str(run_dir))
    wait_for(process, lambda: reached(root, run_dir))
    os.kill(find_worker(process.pid, 1), signal.SIGTERM)
    done = finish(process, ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout[-3000:]
    (iteration,) = re.findall(r"^stopped by SIGTERM after iteration (\d+)/", done.stdout, re.M)
    assert_goes_on(tmp_path, root, int(iteration), uninterrupted)


def test_the_time_limit_saves_and_exits(tmp_path: Path, uninterrupted: list[float]) -> None:
    root, run_dir = tmp_path / "checkpoints", tmp_path / "run"
    done = run(run_dir, *FOREVER, "--exit-duration-in-mins", "0.02", "--save", str(root))
    assert done.returncode == 0, done.stdout[-3000:]
    (iteration,) = re.findall(r"^stopped by --exit-duration-in-mins after iteration (\d+)/", done.stdout, re.M)
    assert f"\nto continue, repeat the command with --load {root}\n" in done.stdout
    assert_goes_on(tmp_path, root, int(iteration), uninterrupted)


def assert_goes_on(tmp_path: Path, root: Path, iteration: int, uninterrupted: list[float]) -> None:
    """The run was saved at its last iteration, and goes on as if nothing had happened, bit for bit."""
    before = losses(tmp_path / "run")
    assert saved(root) == iteration == len(before)
    assert not list(root.glob(".saving_*"))
    assert before + train_on(tmp_path, root, iteration + 3) == uninterrupted[:iteration + 3]
