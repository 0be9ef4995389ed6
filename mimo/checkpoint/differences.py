"""Which flags of a run differ from those of a checkpoint."""

from __future__ import annotations

import tomllib
from typing import Any

from mimo.config.cli import to_toml
from mimo.config.run import RunConfig

# Flags of one start of a run, which say nothing about the run itself; as those that say what it loads.
_OF_A_START = frozenset({
    "load", "save", "ckpt_step", "finetune", "run_dir", "tensorboard_dir", "progress", "log_interval", "device",
    "watchdog_timeout_s", "checkpoint_timeout_s", "exit_duration_in_mins", "save_interval", "keep_last", "async_save",
    "dry_run", "world_size", "ckpt_verify", "allow_difference",
})


def flat_config(text: str) -> dict[str, Any]:
    """A configuration as TOML by flag name. Raises ValueError for what is not TOML."""
    return _flat(_sections(text))


def _sections(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the configuration in the checkpoint is not TOML: {error}") from error


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for section in sections.values() for name, value in section.items()}


def config_differences(saved: str, config: RunConfig) -> list[str]:
    """One line for each flag whose value is not the checkpoint's.

    Left out are flags of a single start, and sections that one of the two has not: those of another program's.
    """
    theirs, own = _sections(saved), _sections(to_toml(config))
    before, now = (_flat({name: each[name] for name in theirs.keys() & own.keys()}) for each in (theirs, own))
    lines = []
    for name in sorted(before.keys() | now.keys()):
        # A switch that one of the two does not have is off there; a value that it does not have is not set, which is
        # not 0.
        is_same = (before[name] == now[name] if name in before and name in now
                   else before.get(name, False) is now.get(name, False))
        if not name.startswith("load_") and name not in _OF_A_START and not is_same:
            flag = "--" + name.replace("_", "-")
            lines.append(f"{flag} {_shown(now, name)} (checkpoint: {_shown(before, name)})")
    return lines


def _shown(values: dict[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "not set"
