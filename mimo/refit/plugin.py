"""What vLLM loads in each of its processes, by the entry point `vllm.general_plugins` in pyproject.toml."""

from __future__ import annotations

BACKEND = "mimo"


def register() -> None:
    """Make `WeightTransferConfig(backend="mimo")` known; more than once is as good as once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "mimo.refit.receiver", "MimoWeightTransferEngine")
