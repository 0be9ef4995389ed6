"""One rank of an arm of scripts/bench/rl_sweep.py: it updates on fabricated rollouts and writes its measurements.

The arguments are the sweep's settings as JSON, then flags of train_rl.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from mimo.config.cli import parse_as
from mimo.config.rl_run import RlRunConfig, validate_rl
from mimo.config.validate import run_world_size
from mimo.platform import get_platform
from mimo.platform.base import Platform
from mimo.registry import model_provider
from mimo.training.run import launch

if TYPE_CHECKING:
    from mimo.grid.groups import Grids
    from mimo.rl.policy import PolicyTrainer
    from mimo.rl.rollouts import Completion

# Messages about the host's memory, and about a GPU's if a library asks for it. These errors have no type of their own.
MEMORY_MARKS = ("DefaultCPUAllocator", "can't allocate memory", "Cannot allocate memory", "CUDA error: out of memory",
                "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 'out of memory'")
GIB = 2**30


def rollouts(settings: dict[str, Any], config: RlRunConfig, vocab_size: int, step: int) -> list[Completion]:
    """Fabricate the completions of a global batch, the same on every rank and for every layout and budget.

    Lengths are log-normal. If the logarithm has the standard deviation s, its mean is ln(mean) - s^2 / 2.
    """
    from mimo.rl.rollouts import Completion

    mean, spread = settings["completion_length"]
    prompt_length, longest = settings["prompt_length"], config.rollout.max_completion_tokens
    rng = np.random.default_rng([config.train.seed, step])
    drawn = rng.lognormal(math.log(mean) - spread**2 / 2, spread, config.train.global_batch_size)
    found = []
    for number, length in enumerate(np.clip(np.rint(drawn), 1, longest).astype(int)):
        prompt, place = divmod(number, config.rl.completions_per_prompt)
        ids = rng.integers(0, vocab_size, prompt_length + length).tolist()
        # Close to those of an untrained model, so that not all importance weights are clipped.
        log_probs = (-math.log(vocab_size) - 0.1 * rng.random(length)).tolist()
        found.append(Completion(
            f"prompt {prompt}#{place}", prompt, tuple(ids[:prompt_length]), tuple(ids[prompt_length:]),
            tuple(log_probs), "length" if length == longest else "stop", float(rng.random())))
    return found


def limit_memory(limit_gib: float | None, platform: Platform) -> None:
    """Limit the memory of tensors on the GPU or, on the CPU, of everything that is allocated from now on."""
    if limit_gib is None:
        return
    if platform.name == "cpu":
        # The limit comes on top of what Python, its libraries and their threads hold by now.
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        held, (_, most) = 1024 * int(fields["VmData"].split()[0]), resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (held + int(limit_gib * GIB), most))
        return
    import torch

    total = torch.cuda.get_device_properties(platform.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(limit_gib * GIB / total, 1.0), platform.device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the GPU or the host has not enough memory."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, (RuntimeError, OSError)) and any(mark in str(error) for mark in MEMORY_MARKS))


def peaks(platform: Platform) -> dict[str, int]:
    """High-water marks of memory in bytes."""
    found = {"allocated": platform.peak_memory_bytes()}
    if platform.name != "cpu":
        import torch

        found["reserved"] = torch.cuda.max_memory_reserved()
    return found


class Rank:
    """The measurements of this rank.

    Args:
        settings: settings of the sweep.
        config: configuration of the arm.
        grids: process groups.
        platform: device and backend.
    """

    def __init__(self, settings: dict[str, Any], config: RlRunConfig, grids: Grids, platform: Platform) -> None:
        self.settings, self.config, self.grids, self.platform = settings, config, grids, platform
        self.provider = model_provider(config.model.model_provider)
        self.vocab_size: int = self.provider.token_spec(config.model_family).vocab_size
        self.updates: list[dict[str, float]] = []

    def run(self) -> None:
        """Set up, update, and write the measurements. A rank that runs out of memory writes what it has and exits."""
        try:
            self._measure()
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            if self.platform.name == "cpu":
                _, most = resource.getrlimit(resource.RLIMIT_DATA)
                resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            self._write(" ".join(str(error).split()) or type(error).__name__)
            # The other ranks wait for this one in a collective. torchrun ends them when this one exits.
            os._exit(1)
        self._write("")

    def _write(self, out_of_memory: str) -> None:
        record = {"rank": self.grids.rank, "out_of_memory": out_of_memory, "peaks": peaks(self.platform),
                  "updates": self.updates[1:]}
        path = Path(self.settings["out"]) / f"rank{self.grids.rank}.json"
        path.write_text(json.dumps(record), encoding="utf-8")

    def _measure(self) -> None:
        import torch.distributed as dist

        trainer = self._set_up()
        self.platform.reset_peak_memory()
        for step in range(self.settings["repeats"] + 1):
            completions = rollouts(self.settings, self.config, self.vocab_size, step)
            own = [each.batch.text for each in trainer.microbatches(completions)]
            self.platform.synchronize()
            dist.barrier(group=self.grids.host)
            began = time.perf_counter()
            result = trainer.update(completions)
            self.platform.synchronize()
            seconds, log_probs_s = time.perf_counter() - began, result.log_probs_s + result.reference_s
            self.updates.append({
                "log_probs_s": log_probs_s, "update_s": seconds - log_probs_s, "tokens": result.num_tokens,
                "microbatches": result.num_microbatches, "lane": self.grids.layout.language.coordinates(
                    self.grids.rank)["dp"],
                "positions": sum(text.input_ids.shape[1] for text in own if text is not None)})
        trainer.parts.watchdog.close()

    def _set_up(self) -> PolicyTrainer:
        """Set up the trainer as `mimo.rl.loop.RlLoop` does, without an engine."""
        from mimo.checkpoint.state import RunState
        from mimo.rl.policy import PolicyTrainer
        from mimo.rl.reference import reference_policy
        from mimo.training.setup import setup_trainer, start
        from mimo.watchdog.watchdog import Watchdog

        config = self.config
        limit_memory(self.settings["memory_limit_gib"], self.platform)
        watchdog = Watchdog(config.train.watchdog_timeout_s, self.grids.describe())
        # A sequence of the schedule is a packed microbatch.
        train = replace(config.train, seq_length=config.rl.max_tokens_per_microbatch)
        parts = setup_trainer(replace(config, train=train), self.provider, self.grids, self.platform, watchdog)
        state = RunState(config, self.grids, self.platform, parts.built, parts.optimizer, parts.scheduler)
        start(state, self.provider, None, watchdog)
        reference, _ = reference_policy(state, self.provider, config.rl, watchdog, resumed=False)
        return PolicyTrainer(parts, config.rl, self.vocab_size, 0, reference=reference)


def main() -> int:
    """Run one rank under torchrun and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=json.loads, help="JSON from rl_sweep.py; flags of train_rl.py follow")
    given, flags = parser.parse_known_args()
    settings = given.settings
    sys.path.append(os.getcwd())
    config = parse_as(RlRunConfig, flags, "")
    # With its own rank, the first process would open the prompts. rl_sweep.py has checked them already.
    layout = validate_rl(config, run_world_size(config, os.environ), rank=-1)
    platform = get_platform(config.train.device)

    def body(run: RlRunConfig, grids: Grids, _: Platform) -> None:
        Rank(settings, run, grids, platform).run()

    return launch(config, layout, body)


if __name__ == "__main__":
    sys.exit(main())
