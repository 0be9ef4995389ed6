"""Base of every text model's provider: no encoder, no images, one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, BuildContext, ParameterShape, TokenSpec
from providers.common.checks import Problems
from providers.common.computed import FamilyProvider


class TextProvider(FamilyProvider):
    """Methods of `mimo.protocols.ModelProvider` that do not depend on the family.

    The provider of a family adds the other methods, and `sizes_of_hf`.

    Attributes:
        check: notes sizes that no layout can hold.
        check_grid: notes sizes that the language grid and `--seq-length` cannot hold.
        shapes: returns every parameter.
    """

    check: ClassVar[Callable[[Any, Problems], None]]
    check_grid: ClassVar[Callable[[Any, GridSpec, int, Problems], None]]
    shapes: ClassVar[Callable[[Any], list[ParameterShape]]]

    def encoders(self, config: Any) -> tuple[str, ...]:
        """Return nothing, because there is only the language model."""
        return ()

    def validate_sizes(self, config: Any) -> None:
        """Check sizes against each other.

        Raises:
            ValueError: sizes do not fit; the message has a line for each, with flags, values and what would fit.
        """
        source, problems = config.hf_config, Problems()
        self.check(self.resolved(config), problems)
        problems.report(f"--hf-config {source}" if source else "")

    def validate(self, config: Any, layout: Layout, seq_length: int) -> None:
        """Check sizes against each other, against the grid and against the sequence.

        Raises the errors of `validate_sizes`.
        """
        self.validate_sizes(config)
        source, problems = config.hf_config, Problems()
        self.check_grid(self.resolved(config), layout.language, seq_length, problems)
        problems.report(f"--hf-config {source}" if source else "")

    def parameter_shapes(self, config: Any, module: str) -> list[ParameterShape]:
        self.check_module(module)
        return self.shapes(self.resolved(config))

    def token_spec(self, config: Any) -> TokenSpec:
        """Return what a data set must produce: text. Placeholders get an id that no token has."""
        return TokenSpec(self.resolved(config).vocab_size, image_token_id=-1, image_size=0, num_channels=0)

    def special_token_ids(self, config: Any) -> dict[str, int]:
        """Return nothing, because there are no placeholders."""
        return {}

    def num_image_tokens(self, config: Any, module: str, height: int, width: int) -> int:
        """Raise ValueError, because a text model takes no images."""
        raise ValueError(f"an image of {height} x {width} pixels: a text model takes no images")

    def encoder_spec(self, config: Any, module: str, context: BuildContext) -> Any:
        """Raise ValueError, because there is no encoder."""
        raise ValueError(f"a text model has no encoder {module}")

    @staticmethod
    def check_module(module: str) -> None:
        """Raise an error for a module other than `language`."""
        assert module == LANGUAGE, f"a text model has the module {LANGUAGE}, not {module}"
