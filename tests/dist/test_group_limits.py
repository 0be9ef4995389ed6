"""Time limits of collectives: the watchdog's limit on devices, and as long as the watchdog waits on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.equality import parse_config
from tests.support.spawn import WorkerPool, _free_port

pytestmark = pytest.mark.slow

WATCHDOG = ("--watchdog-timeout-s", "45")
RL = """--model-provider causal_lm --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 64
--vocab-size 100 --no-bf16 --device cpu --transformer-impl local --seq-length 64 --max-completion-tokens 16
--max-tokens-per-microbatch 128 --global-batch-size 16 --completions-per-prompt 4 --train-iters 3 --llm-dp 2
--refit-timeout-s 100""".split()


def set_up_training(loop: Any) -> None:
    from mimo.training.setup import setup_trainer

    setup_trainer(loop.config, loop.provider, loop.grids, loop.platform, loop.watchdog)


def pretrain(flags: tuple[str, ...], watched: Callable[[Any, Any], None]) -> None:
    from mimo.config.validate import validate
    from mimo.training import loop, run

    config = parse_config(*flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_show_log", lambda rank: None)  # the process lives on
        patch.setattr(loop.TrainingLoop, "run", lambda self: watched(self, set_up_training))
        run.run(config, validate(config, 2))


def reinforce(flags: tuple[str, ...], watched: Callable[[Any, Any], None]) -> None:
    from mimo.config.cli import parse_as
    from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
    from mimo.rl import loop, run
    from mimo.training import run as training_run

    config = parse_as(RlRunConfig, [*RL, *flags], DESCRIPTION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "_show_log", lambda rank: None)
        patch.setattr(loop.RlLoop, "run", lambda self: watched(self, lambda self: self._set_up()))
        run.run(config, validate_rl(config, 2))


def limits(rank: int, entry: Callable[..., None], flags: tuple[str, ...], port: int, run_dir: str) -> Any:
    """Limits of this rank's groups once an entry point's trainer is set up: the host's, the other groups'."""
    import torch
    import torch.distributed as dist

    found: list[tuple[timedelta, list[timedelta]]] = []

    def watched(loop: Any, set_up: Callable[[Any], None]) -> None:
        set_up(loop)
        loop.watchdog.close()
        by_group = {group: group._get_backend(torch.device("cpu")).options._timeout
                    for group in dist.distributed_c10d._world.pg_map}
        found.append((by_group.pop(loop.grids.host), list(by_group.values())))

    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    entry((*flags, "--run-dir", run_dir), watched)
    return found[0]


@pytest.mark.parametrize(("entry", "flags", "expected_s"), [
    pytest.param(pretrain, (*WATCHDOG, "--encoder-dp", "1", "--llm-dp", "1"), 90, id="disjoint"),
    pytest.param(pretrain, (*WATCHDOG, *"--layout colocated --encoder-tp 2 --llm-dp 2".split()), 90, id="colocated"),
    pytest.param(pretrain, ("--watchdog-timeout-s", "5", "--encoder-dp", "1", "--llm-dp", "1"), 60, id="least"),
    # A refit is given twice --refit-timeout-s.
    pytest.param(reinforce, WATCHDOG, 400, id="rl"),
])
def test_every_group_has_the_limit_that_the_flags_ask_for(pool, tmp_path, entry, flags, expected_s):
    from mimo.config.checks import MAX_TIMEOUT_S

    for of_host, others in pool.run(limits, entry, flags, _free_port(), str(tmp_path), world_size=2):
        # The first rank of a step may wait for the engine, then for rewards.
        assert of_host > 3 * timedelta(seconds=MAX_TIMEOUT_S)
        assert len(others) > 10
        assert set(others) == {timedelta(seconds=expected_s)}


NEVER_WATCHED = """
import sys, time
from mimo.platform import get_platform
get_platform("cpu")
from mimo.config.validate import validate
from mimo.training import run
from tests.support.equality import parse_config
run.START_LIMIT_S = 1.0
config = parse_config("--layout", "colocated", "--run-dir", sys.argv[1])
run.launch(config, validate(config, 1), lambda config, grids, platform: time.sleep(600))
"""


def test_a_rank_that_hangs_before_it_has_a_watchdog_ends_with_its_stacks(tmp_path, pytestconfig):
    environment = {**os.environ, "PYTHONPATH": str(pytestconfig.rootpath), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", NEVER_WATCHED, str(tmp_path)], env=environment, capture_output=True,
                          text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "Timeout (0:00:01)!" in done.stderr and "in _with_groups" in done.stderr


BESIDE_ANOTHER = """
import sys, time
from pathlib import Path
from mimo.platform import get_platform
get_platform("cpu")
from mimo.config.validate import validate
from mimo.training import run
from tests.support.equality import parse_config
folder, own, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def body(config, grids, platform):
    (folder / own).touch()
    until = time.monotonic() + 100
    while not (folder / other).exists():
        assert time.monotonic() < until, "the other run has not begun"
        time.sleep(0.1)
config = parse_config("--layout", "colocated", "--run-dir", str(folder))
run.launch(config, validate(config, 1), body)
"""


def test_runs_of_one_process_share_a_host(tmp_path, pytestconfig):
    environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    environment |= {"PYTHONPATH": str(pytestconfig.rootpath), "OMP_NUM_THREADS": "1"}
    runs = [subprocess.Popen([sys.executable, "-c", BESIDE_ANOTHER, str(tmp_path), *names], env=environment, text=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for names in ("ab", "ba")]
    errors = [run.communicate(timeout=250)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors


def test_groups_of_nccl_have_it_too(pool: WorkerPool) -> None:
    assert pool.run(nccl_limit, world_size=1, timeout_s=77) == [timedelta(seconds=77)]


def nccl_limit(rank: int) -> timedelta:
    """Return torch's default timeout of a NCCL group, which the CPU platform would turn into gloo."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_timeout(distributed_c10d.Backend("nccl"))
