"""Flags of the data that do not depend on the data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """Data: which data set."""

    dataset_provider: str = "digits"
    """Data set: a name (arithmetic, digits, energon, mock) or pkg.module:attr."""
    lane_loader: Literal["routed", "per-lane"] = "routed"
    """Who reads data that is costly to read. routed: one rank for each lane, which hands the samples to the others;
    per-lane: every rank opens the lanes that it needs. Both give the same batches."""
