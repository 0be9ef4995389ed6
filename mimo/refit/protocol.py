"""Names that both ends of a refit share. An engine's worker imports them from here, and so without Megatron Core."""

from __future__ import annotations

from typing import Any, Protocol

# Name of the first phase of a refit, in keys of the store and in messages.
SETUP = "set-up"


class EngineClient(Protocol):
    """vLLM's weight-transfer calls; all block until every worker has done its part."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer and agree on the plan."""
        ...

    def start_weight_update(self) -> None:
        """Stop serving."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the weights that the trainer's ranks send meanwhile."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve the new weights."""
        ...
