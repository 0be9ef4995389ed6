"""Helpers with which sections of flags check themselves.

Each section has a method `check`, which raises ValueError for the first thing found wrong; `mimo.config.validate` calls
it on the finished configuration. The rules are not in `__post_init__`, because a section is made from the values of
files before the command line is read: --save-interval of a file may need --save, which only the command line gives.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from mimo.config.toml_file import flag_name

# A week. Sockets, process groups and timers do not accept arbitrarily long timeouts.
MAX_TIMEOUT_S = 604800.0
# Generators take 64 bits, and those of parallel ranks add a little to the seed.
MAX_SEED = 2**62


def refuse(condition: bool, message: str) -> None:
    if condition:
        raise ValueError(message)


def refuse_below(section: Any, bounds: dict[str, float]) -> None:
    """Refuse fields of `section` that are below their bound or not a number. None is accepted."""
    for name, least in bounds.items():
        value = getattr(section, name)
        refuse(value is not None and not value >= least, f"{flag_name(name)} {value} is below {least}")


def is_above(value: float, bound: float) -> bool:
    """Return whether a value is finite and above a bound."""
    return math.isfinite(value) and value > bound


def is_least(value: float, bound: float) -> bool:
    """Return whether a value is finite and not below a bound."""
    return math.isfinite(value) and value >= bound


def check_packages(flags: Any) -> None:
    """Raise ValueError if the package of a tracker that `flags`, an `ObserveConfig`, ask for is not installed."""
    for flag, value, package in (("--wandb-project", flags.wandb_project, "wandb"),
                                 ("--mlflow-uri", flags.mlflow_uri, "mlflow"),
                                 ("--tensorboard-dir", flags.tensorboard_dir, "tensorboard")):
        refuse(value is not None and importlib.util.find_spec(package) is None,
               f"{flag} {value}: the package {package} is not installed; pip install {package}, or leave the flag out")
