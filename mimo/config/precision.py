"""FP8 products as plain data."""

from __future__ import annotations

from dataclasses import dataclass

FP8_MULTIPLES = {"tensorwise": 16, "blockwise": 128}
"""Recipe of FP8 products -> what rows and columns of their operands have to be multiples of."""


@dataclass(frozen=True)
class Fp8:
    """FP8 products of a module.

    Attributes:
        format: `e4m3`, or `hybrid` with e5m2 for gradients.
        recipe: `tensorwise` or `blockwise`.
        flag: the flag that asks for them.
    """

    format: str
    recipe: str
    flag: str

    def __str__(self) -> str:
        return f"{self.flag} {self.format} ({self.recipe})"
