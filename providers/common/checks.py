"""Divisibility checks whose messages name the flags, their values and what would fit."""

from __future__ import annotations

from mimo.config.checks import is_above
from mimo.config.toml_file import flag_name
from mimo.grid.layout import divisors

# Reason why the factor on the weights of routed experts may not be 0.
NO_FACTOR = "Megatron Core would leave the factor out, which stands for 1; give one that is not 0"


def image_flags(height: int, width: int) -> str:
    """Return the flags of an encoder that takes images of `height` by `width` pixels."""
    return f"--vision-image-size {height}" + (f" --vision-image-width {width}" if width != height else "")


class Problems:
    """All problems of a configuration, reported at once.

    Attributes:
        found: messages in the order in which they were added.
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, message: str) -> None:
        self.found.append(message)

    def positive(self, name: str, value: int) -> None:
        """Note a size below 1."""
        if value < 1:
            self.add(f"{flag_name(name)} {value} must be at least 1")

    def above_zero(self, name: str, value: float) -> None:
        """Note a number that is not finite and above 0."""
        if not is_above(value, 0):
            self.add(f"{flag_name(name)} {value} is not a number above 0")

    def least(self, name: str, value: float, least: float) -> None:
        """Note a number that is below `least` or not a number."""
        if not value >= least:
            self.add(f"{flag_name(name)} {value} is below {least:g}")

    def probability(self, name: str, value: float) -> None:
        """Note a probability of dropping something that is not in [0, 1)."""
        if not 0 <= value < 1:
            self.add(f"{flag_name(name)} {value} is not in [0, 1)")

    def divides(self, name: str, value: int, by: str, divisor: int, *, hint: str = "", multiples: bool = False) -> None:
        """Note that `divisor` (of flag `by`) does not divide `value` (of flag `name`).

        Args:
            name: field of the value.
            value: number that should be divisible.
            by: field of the divisor.
            divisor: at least 1.
            hint: another remedy, appended to the message.
            multiples: whether to suggest the nearest multiples of `divisor`, for a value that may be padded, instead of
                the divisors of `value`.
        """
        if value % divisor == 0:
            return
        if multiples:
            below = value // divisor * divisor
            fits = f"nearest {flag_name(name)}: {f'{below} or ' if below else ''}{below + divisor}"
        else:
            choices = divisors(value)
            shown = ", ".join(str(choice) for choice in choices[:12]) + (", ..." if len(choices) > 12 else "")
            fits = f"{flag_name(by)} that fit: {shown}"
        self.add(f"{flag_name(name)} {value} is not divisible by {flag_name(by)} {divisor}; {fits}"
                 f"{f', {hint}' if hint else ''}")

    def shared_rows(self, seq_length: int, cp: int, tp: int) -> None:
        """Note rows that cannot be split. Each context-parallel rank takes two chunks, which `tp` ranks split again."""
        unit = 2 * cp * tp
        if cp > 1 and seq_length % unit:
            below = seq_length // unit * unit
            self.add(f"--seq-length {seq_length} is not divisible by {unit}, twice --llm-cp {cp} times --llm-tp {tp}; "
                     f"nearest --seq-length: {f'{below} or ' if below else ''}{below + unit}")

    def report(self, hf_config: str = "") -> None:
        """Raise ValueError with every problem found. `hf_config` is the file that the sizes come from, if any."""
        if self.found:
            origin = f"\n(model sizes from --hf-config {hf_config})" if hf_config else ""
            raise ValueError("\n".join(self.found) + origin)
