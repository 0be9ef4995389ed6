"""Mistakes of users under torchrun: one message names the mistake, from the rank that found it, and nothing hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.launch import ROOT, find_worker, finish, records, start_torchrun, torchrun, wait_for_steps

pytestmark = pytest.mark.slow

TINY = """--model-provider mock --dataset-provider mock --device cpu --no-bf16 --seq-length 64 --global-batch-size 4
--microbatch-order read --train-iters 3 --watchdog-timeout-s 60 --num-layers 2 --hidden-size 32 --num-attention-heads 4
--num-query-groups 2 --ffn-hidden-size 64 --vocab-size 96 --image-token-id 95 --vision-num-layers 1
--vision-hidden-size 32 --vision-num-attention-heads 4 --vision-ffn-hidden-size 64 --vision-image-size 16
--vision-patch-size 8""".split()
# Ranks of the layout that TINY describes.
VISION, LANGUAGE = "rank 0 (vision grid", "rank 1 (language grid"
ENDS_WITHIN_S = 200


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that report an error, whoever writes them; torchrun's own account of its workers is not one."""
    return [line for line in done.stdout.splitlines() if line.startswith(("error", "stall", "interrupted"))]


def root_cause(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    """Return the rank and the message that torchrun's summary shows as the cause."""
    summary = done.stdout.rpartition("Root Cause (first observed failure):")[2]
    return int(re.findall(r"^  rank      : (\d+)", summary, re.M)[0]), summary.partition("traceback : ")[2]


# Refused before any process group exists

@pytest.mark.parametrize(("flags", "named"), [
    ("--model-provider nowhere:family", "--model-provider nowhere:family"),
    ("--llm-tp 2", "--llm-tp 2"),
    ("--layout colocated --encoder-tp 2 --llm-tp 2 --num-attention-heads 3", "--num-attention-heads 3"),
    ("--no-such-flag 3", "--no-such-flag"),
])
def test_flags_that_cannot_work(flags: str, named: str, tmp_path: Path) -> None:
    done = torchrun(2, *TINY, *flags.split(), "--run-dir", str(tmp_path), timeout_s=ENDS_WITHIN_S)
    assert done.returncode != 0
    if "such" not in named:  # of what cannot be parsed, the parser has its own form
        (message,) = errors_of(done)
        assert named in message
    rank, message = root_cause(done)
    assert rank == 0 and named in message
    assert not list(tmp_path.iterdir())


# Met while training

SECOND_BATCH = "mock/train/000006"
SAMPLES = {
    "missing_image": (VISION, f"sample {SECOND_BATCH}: declares 2 images but holds 1"),
    "fewer_images_encoded": (LANGUAGE, f"sample '{SECOND_BATCH}' (lane 0, microbatch 2): its text has 8 image tokens, "
                                       "but vision rank 0 makes 4 of its images"),
    "overflow": (LANGUAGE, f"the loss of the global batch is nan; .*microbatch 2, samples {SECOND_BATCH}"),
    "cropped_image": (VISION, f"sample {SECOND_BATCH}: image 1 is float32 [3, 15, 16], declared float32 [3, 16, 16]"),
    "another_sample_encoded": (LANGUAGE, f"reads sample '{SECOND_BATCH}', but vision rank 0 encodes sample "
                                         f"'{SECOND_BATCH}-other'"),
}


@pytest.mark.parametrize("fault", SAMPLES)
def test_a_bad_sample(fault: str, tmp_path: Path) -> None:
    rank, message = SAMPLES[fault]
    done = torchrun(2, *TINY, "--dataset-provider", f"tests.support.bad_data:{fault}", "--run-dir", str(tmp_path),
                    timeout_s=ENDS_WITHIN_S)
    assert done.returncode != 0
    (found,) = errors_of(done)
    assert found.startswith(f"error on {rank}") and "ValueError" in found
    pattern = message if ".*" in message else re.escape(message)
    assert re.search(pattern, found)
    root, told = root_cause(done)
    assert rank.startswith(f"rank {root} ") and re.search(pattern, told)
    assert [record["iteration"] for record in records(tmp_path)] == [1], "the step before was taken, none after"


def test_a_sample_that_is_bad_on_both_sides(tmp_path: Path) -> None:
    """Either side may meet it first; both say the same."""
    done = torchrun(2, *TINY, "--dataset-provider", "tests.support.bad_data:missing_size", "--run-dir", str(tmp_path),
                    timeout_s=ENDS_WITHIN_S)
    assert done.returncode != 0
    (message,) = {found.partition("ValueError: ")[2] for found in errors_of(done)}
    assert message == f"sample {SECOND_BATCH}: 2 image placeholders (token id 95) but 1 image"


def test_a_file_that_a_data_set_misses_is_told_once_and_before_the_model_is_built(tmp_path: Path) -> None:
    done = torchrun(2, *TINY, "--dataset-provider", "tests.support.bad_data:unopened", "--run-dir", str(tmp_path),
                    timeout_s=ENDS_WITHIN_S)
    (found,) = errors_of(done)
    assert found.endswith("ValueError: --dataset-provider tests.support.bad_data:unopened: [Errno 2] No such file or "
                          "directory: 'nowhere/list.txt'")
    own = done.stdout.partition("torch/distributed/elastic")[0]
    assert "Traceback" not in own and "layers: " not in own


def test_a_process_that_is_killed_is_the_cause_and_not_the_rank_that_misses_it(tmp_path: Path) -> None:
    process = start_torchrun(2, *TINY, "--train-iters", "100000", "--run-dir", str(tmp_path))
    wait_for_steps(tmp_path, process)
    os.kill(find_worker(process.pid, 1), signal.SIGKILL)
    done = finish(process, ENDS_WITHIN_S)
    assert done.returncode != 0
    rank, told = root_cause(done)
    assert rank == 1 and "Signal 9 (SIGKILL)" in told


def test_a_refusal_of_one_rank_alone_is_told(tmp_path: Path) -> None:
    """Rank 0 finds nothing wrong, and waits for the others."""
    (tmp_path / "one_rank.py").write_text(
        "import os\nfrom data.mock import provider\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('this node lacks its data')\n")
    done = torchrun(2, *TINY, "--dataset-provider", "one_rank:provider", "--run-dir", str(tmp_path / "run"),
                    timeout_s=ENDS_WITHIN_S, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode != 0
    rank, told = root_cause(done)
    assert rank == 1 and "this node lacks its data" in told
    assert "this node lacks its data" in done.stdout.partition("Root Cause")[0]


# Told to stop

def test_sigterm_to_one_worker_ends_the_run_in_order(tmp_path: Path) -> None:
    process = start_torchrun(2, *TINY, "--train-iters", "100000", "--run-dir", str(tmp_path))
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + ENDS_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.2)
    if process.poll() is None:
        os.kill(find_worker(process.pid, 1), signal.SIGTERM)
    done = finish(process, ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout[-3000:]
    assert errors_of(done) == []
    (iteration,) = re.findall(r"^stopped by SIGTERM after iteration (\d+)/100000 \|", done.stdout, re.M)
    assert json.loads(metrics.read_text().splitlines()[-1])["iteration"] == int(iteration)
