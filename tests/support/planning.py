"""Runs on H200 as `mimo plan` sees them, from flags of presets of scripts/bench or from flags alone."""

from __future__ import annotations

from collections.abc import Sequence

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from mimo.planner.candidates import Candidate, Search
from mimo.planner.costs import Costs, Profile
from mimo.planner.gpus import GPUS
from mimo.planner.predict import Prediction, Step, predict
from mimo.planner.workload import SampleSize
from scripts.bench import presets

H200 = Profile(GPUS["H200"])


def config_of(flags: str, preset: str = "") -> RunConfig:
    return parse([*(presets.PRESETS[preset] if preset else ()), "--bf16", "--train-iters", "1", *flags.split()])


def step_of(config: RunConfig, gpus: int) -> Step:
    return Step(config, validate(config, gpus), Costs(config, H200))


def predicted(config: RunConfig, gpus: int, samples: Sequence[SampleSize], profile: Profile = H200) -> Prediction:
    return predict(config, validate(config, gpus), Costs(config, profile), samples)


def searched(config: RunConfig, gpus: int, samples: Sequence[SampleSize], profile: Profile = H200
             ) -> list[Candidate]:
    return Search(config, Costs(config, profile), samples, gpus).run()
