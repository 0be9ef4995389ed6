"""`train_rl.py` whose processes are killed at random: it goes on or ends by name, and nothing is lost or repeated.

The victims are a rank of the trainer, the first rank with the store of the refits, the engine, one of its workers, and
the Ray actor of an engine. Each kill and what followed is printed. `KILLS` and `KILL_SEED` set number and seed:

    KILLS=20 KILL_SEED=3 python -m pytest -s tests/e2e/test_rl_kills.py
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.support.launch import ROOT, environment, find_worker, marked, records, torchrun, wait_for_the_end

NUM_KILLS = int(os.environ.get("KILLS", "4"))
SEED = int(os.environ.get("KILL_SEED", "1"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 + 600 * NUM_KILLS)]

RUN_FLAGS = """--device cpu --no-bf16 --transformer-impl local --model-provider causal_lm --num-layers 2
--hidden-size 64 --num-attention-heads 2 --kv-channels 32 --ffn-hidden-size 64 --vocab-size 100 --llm-dp 2
--seq-length 32 --max-completion-tokens 12 --max-tokens-per-microbatch 96 --global-batch-size 16
--completions-per-prompt 8 --lr 1e-2 --lr-decay-style constant --reward tests.support.rl_rewards:digits
--eval-prompts 0 --engine-restarts 2 --refit-timeout-s 60 --rollout-timeout-s 90 --watchdog-timeout-s 120
--save-interval 1 --keep-last 3""".split()
FIGURES = ("reward", "completion-length", "loss", "consumed_samples", "policy-version")
# A run goes on or ends within this time. Every wait of it ends within the longest of its time limits, and a launcher
# ends its workers. The start of a run or of a new engine reads torch and vLLM in up to seven processes, which may take
# more than five minutes on two cores that others use as well.
LIMIT_S = 900.0
VICTIMS = {"separate": ("rank 0 with the store", "rank 1", "the engine", "a worker of the engine"),
           "ray": ("rank 0 with the store", "rank 1", "the actor")}


@dataclass
class KilledRun:
    """A run that is started again, from its last checkpoint, whenever a kill has ended it.

    Attributes:
        folder: folder of the run.
        flags: flags of the run, without its length.
        num_iterations: its length. No run may end by itself before all kills are done, however fast the machine is.
        launcher: the launcher, while the run goes on.
        told: what each kill did, in words.
    """

    folder: Path
    flags: list[str]
    num_iterations: int = 1_000_000
    launcher: subprocess.Popen[str] | None = None
    told: list[str] = field(default_factory=list)

    def start(self) -> subprocess.Popen[str]:
        """Start the run, unless it runs."""
        if self.launcher is None:
            self.log = self.folder / f"output-{len(self.told)}"
            command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "train_rl.py")]
            saved = str(self.folder / "saved")
            with self.log.open("w") as output:
                self.launcher = subprocess.Popen(
                    [sys.executable, "-m", *command, *self.flags, "--train-iters", str(self.num_iterations),
                     "--save", saved, "--load", saved, "--run-dir", str(self.folder / "run")],
                    cwd=ROOT, env=environment(MARK=str(self.folder)), text=True, stdout=output,
                    stderr=subprocess.STDOUT)
        return self.launcher

    def terminate(self) -> None:
        """End the run with SIGTERM, if it runs."""
        if self.launcher is not None:
            self.launcher.terminate()
            self.launcher.wait()
            self.launcher = None

    @property
    def num_steps(self) -> int:
        """Number of iterations on record."""
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for(self, steps: int, within_s: float) -> bool:
        """Wait until so many iterations are on record; returns whether the run still goes on."""
        launcher, deadline = self.start(), time.monotonic() + within_s
        while self.num_steps < steps:
            if launcher.poll() is not None:
                return False
            assert time.monotonic() < deadline, \
                f"neither went on nor ended within {within_s:g} s: {self.told}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)
        return True

    def victim(self, name: str) -> psutil.Process | None:
        """Find a process by its name among `VICTIMS`; None if it does not run now."""
        assert self.launcher is not None
        try:
            rank = psutil.Process(find_worker(self.launcher.pid, 1 if name == "rank 1" else 0))
            if name.startswith("rank"):
                return rank
            children = {each: " ".join(each.cmdline()) for each in rank.children(recursive=name == "the actor")}
            wanted = "EngineActor" if name == "the actor" else "spawn_main"
            engines = [each for each, line in children.items() if wanted in line]
            if name == "a worker of the engine":
                engines = [each for engine in engines for each in engine.children(recursive=True)
                           if "resource_tracker" not in " ".join(each.cmdline())]
            return engines[-1] if engines else None
        except (LookupError, OSError, psutil.Error):
            return None

    def kill(self, name: str) -> None:
        """Kill a process, and check that the run goes on or ends by name."""
        found, before = self.victim(name), self.num_steps
        if found is None:
            return
        began = time.monotonic()
        found.kill()
        # A checkpoint may be older than the record, so that the first iteration of a resumed run is on record already.
        goes_on = self.wait_for(before + 2, LIMIT_S)
        seconds = time.monotonic() - began
        text = self.log.read_text()
        if goes_on:
            outcome = "went on with a new engine" if "a new one takes its place" in text else "went on"
        else:
            assert self.launcher is not None and self.launcher.wait() != 0, f"{name} was killed and nobody noticed"
            named = re.search(r"(RefitError: .{0,200}|traceback : Signal 9 .*|exitcode *: -9.*)", text)
            assert named is not None, f"{name}: no error that names it\n{text[-3000:]}"
            outcome = f"ended: {named.group(1)[:160]}"
            left = wait_for_the_end(str(self.folder))
            assert left == [], f"{name}: processes are left behind: {left}"
            self.launcher = None
        self.told.append(f"{len(self.told) + 1}. {name}, after {before} iterations: {outcome} ({seconds:.0f} s)")
        print(self.told[-1], flush=True)


@pytest.mark.parametrize("placement", VICTIMS)
def test_killed_at_random_and_resumed(tmp_path: Path, placement: str) -> None:
    generator, engine = random.Random(SEED), ["--engine-placement", placement]
    if placement == "separate":
        engine += ["--engine-tp", "2"]
    flags = [*RUN_FLAGS, *engine]
    print(f"\n{placement}: {NUM_KILLS} kills, KILL_SEED={SEED}", flush=True)
    run = KilledRun(tmp_path / "killed", flags)
    run.folder.mkdir()
    try:
        while len(run.told) < NUM_KILLS:
            is_new = run.launcher is None
            launcher = run.start()
            if is_new and generator.random() < 0.3:
                time.sleep(generator.random() * 30)  # while it starts
            else:
                run.wait_for(run.num_steps + 1, LIMIT_S)
                time.sleep(generator.random() * 2)
            assert launcher.poll() is None, f"ended before it was killed: {run.log.read_text()[-3000:]}"
            run.kill(generator.choice(VICTIMS[placement]))
        run.terminate()
        run.num_iterations = run.num_steps + 5
        assert run.start().wait(timeout=LIMIT_S + 60 * NUM_KILLS) == 0, run.log.read_text()[-3000:]
    finally:
        run.terminate()
    assert wait_for_the_end(str(run.folder)) == []
    found = records(run.folder / "run")
    done = torchrun(2, *flags, "--train-iters", str(run.num_iterations), "--save", str(tmp_path / "saved"),
                    "--run-dir", str(tmp_path / "whole"), script="train_rl.py", timeout_s=LIMIT_S + 60 * NUM_KILLS,
                    MARK=str(tmp_path))
    assert done.returncode == 0 and not marked(str(tmp_path)), done.stdout[-3000:]
    assert [step["iteration"] for step in found] == list(range(1, len(found) + 1)), "iterations are lost or repeated"
    for mine, other in zip(found, records(tmp_path / "whole"), strict=True):
        for key in FIGURES:
            assert mine[key] == pytest.approx(other[key], abs=1e-5), f"{key} of iteration {mine['iteration']}"
