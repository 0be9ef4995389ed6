"""`train_rl.py` with engines that are several, or Ray actors: it trains as with one, and nothing is left behind it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.test_train_rl import FLAGS
from tests.support.launch import records, torchrun, torchrun_on_two_hosts, wait_for_the_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ONE_PROCESS = [*FLAGS, "--llm-dp", "1", "--llm-ep", "1", "--train-iters", "2"]


@pytest.mark.parametrize("placement", ["--engine-dp 2", "--engine-placement ray"])
def test_a_run_trains_on_completions_of_the_weights_as_they_are(tmp_path: Path, placement: str) -> None:
    done = torchrun(1, *ONE_PROCESS, *placement.split(), "--reward", "tests.support.rl_rewards:digits",
                    "--run-dir", str(tmp_path), script="train_rl.py", timeout_s=1100, MARK=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    steps = records(tmp_path)
    assert [step["policy-version"] for step in steps] == [0, 1]
    for step in steps:
        assert 0 <= step["gen-kl"] < 1e-5 and step["max-abs-dlogp"] < 1e-3 and step["success"]
    assert re.fullmatch(r"reward: \d\.\d{4}", done.stdout.strip().splitlines()[-1]), done.stdout[-1000:]
    assert wait_for_the_end(str(tmp_path)) == []


def test_replicas_on_the_devices_of_trainers_on_two_hosts(tmp_path: Path) -> None:
    done = torchrun_on_two_hosts(*FLAGS, "--train-iters", "2", "--engine-placement", "colocated", "--engine-dp", "2",
                                 "--reward", "tests.support.rl_rewards:digits", run_dir=tmp_path, timeout_s=1000)
    assert [each.returncode for each in done] == [0, 0], done[0].stdout[-3000:] + done[1].stdout[-2000:]
    steps = records(tmp_path)
    assert [step["policy-version"] for step in steps] == [0, 1]
    for step in steps:
        assert 0 <= step["gen-kl"] < 1e-5 and step["max-abs-dlogp"] < 1e-3 and step["success"]


def test_an_actor_that_is_killed_ends_the_run_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    done = torchrun(1, *ONE_PROCESS, "--engine-placement", "ray", "--reward", "tests.support.rl_rewards:killing_actor",
                    "--run-dir", str(tmp_path), script="train_rl.py", timeout_s=1100, MARK=str(tmp_path))
    assert done.returncode != 0
    assert [step["iteration"] for step in records(tmp_path)] == [1], done.stdout[-3000:]
    assert re.search(r"RefitError: (.|\n)*the engine in process \d+ on .* \(a Ray actor\) has ended", done.stdout), \
        done.stdout[-3000:]
    assert wait_for_the_end(str(tmp_path)) == []
