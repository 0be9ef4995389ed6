"""Flags of the data that do not depend on the data set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """Data: which data set."""

    dataset_provider: str = "digits"
    """Data set: a name (digits, mock) or pkg.module:attr."""
