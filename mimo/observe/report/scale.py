"""Axes: where a value lies, and which values get a line."""

from __future__ import annotations

import math
from dataclasses import dataclass


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` onto pixels from `start` to `end`.

    Attributes:
        log: equal distances are equal ratios; both ends are above 0.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Place of a value, pixels."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, most: int) -> list[float]:
        """Round values on the axis, about `most` at most."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, -(-(last - first + 1) // most))
            tens = [10.0**power for power in range(first, last + 1, every)]
            if len(tens) >= 2:
                return tens
        step = nice_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def fitting(low: float, high: float, start: float, end: float, *, log: bool = False, zero: bool = False) -> Scale:
    """A scale on which values from `low` to `high` have a little room, `zero` being on it if asked for."""
    if log:
        return Scale(low / 1.15, high * 1.15, start, end, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # a constant
        room = abs(high) * 0.1 or 1.0
    else:
        room = (high - low) * 0.06
    return Scale(low if low == 0 or (zero and low >= 0) else low - room, high + room, start, end)
