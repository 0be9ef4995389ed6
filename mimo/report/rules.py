"""The trainer's own rules, for flags that a report may advise."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from mimo import registry
from mimo.config import rl_run
from mimo.config.cli import HF_FOLDERS, parse, parse_as
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate_without_data
from mimo.grid.layout import required_world_size
from mimo.report.run_reader import FLAGS, Run

# The first rank opens the prompts, which need not be on this machine.
NO_READER = 1


class Rules:
    """Asks the trainer's own rules whether it would accept a run, with further flags beside its own."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @cached_property
    def config(self) -> RunConfig | None:
        """The run's own flags; None if they cannot be checked here, where a file or a provider may be missing."""
        given = [value for section in self._run.flags.values() for name, value in section.items()
                 if name.replace("-", "_") in HF_FOLDERS and value]
        # A folder that is not here might be taken for a model of the hub, which would be asked for it.
        if not all(Path(folder).exists() for folder in given):
            return None
        try:
            config = self._parsed([])
            _check(config)
        except (ImportError, OSError, ValueError):
            return None
        return config

    def accept(self, flags: str) -> bool:
        """Return whether the trainer accepts the run with these flags, as far as that is known without its data."""
        if self.config is None:
            return True
        try:
            _check(self._parsed(shlex.split(flags)))
        except ValueError:
            return False
        return True

    def _parsed(self, words: Sequence[str]) -> RunConfig:
        argv = ["--config", str(self._run.path / FLAGS), *words]
        if "rl" in self._run.flags:
            return parse_as(rl_run.RlRunConfig, argv, rl_run.DESCRIPTION)
        return parse(argv)


def _check(config: RunConfig) -> None:
    """Raise ValueError if the trainer refuses a run, whatever is installed on this machine."""
    encoders = registry.model_provider(config.model.model_provider).encoders(config.model_family)
    world = required_world_size(config.layout, encoders)
    config = replace(config, train=replace(config.train, dry_run=True, world_size=None))
    if isinstance(config, rl_run.RlRunConfig):
        rl_run.validate_rl(config, world, rank=NO_READER)
    else:
        validate_without_data(config, world)
