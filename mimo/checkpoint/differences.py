"""Which flags of a run differ from those of a checkpoint."""

from __future__ import annotations

import tomllib
from typing import Any

from mimo.config.cli import to_toml
from mimo.config.run import RunConfig

# Flags of one start of a run, which say nothing about the run itself; as those that say what it loads.
_OF_A_START = frozenset({
    "load", "save", "ckpt_step", "finetune", "run_dir", "tensorboard_dir", "progress", "log_interval", "device",
    "watchdog_timeout_s", "exit_duration_in_mins", "save_interval", "keep_last", "async_save", "dry_run", "world_size",
    "ckpt_verify",
})


def flat_config(text: str) -> dict[str, Any]:
    """A configuration as TOML by flag name. Raises ValueError for what is not TOML."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the configuration in the checkpoint is not TOML: {error}") from error
    return {name.replace("-", "_"): value for section in values.values() for name, value in section.items()}


def config_differences(saved: str, config: RunConfig) -> list[str]:
    """One line for each flag whose value is not the checkpoint's, leaving out those of a single start."""
    before, now = flat_config(saved), flat_config(to_toml(config))
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if not name.startswith("load_") and name not in _OF_A_START and before.get(name) != now.get(name):
            flag = "--" + name.replace("_", "-")
            lines.append(f"{flag} {_shown(now, name)} (checkpoint: {_shown(before, name)})")
    return lines


def _shown(values: dict[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "not set"
