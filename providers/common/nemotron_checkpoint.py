"""Megatron checkpoints of a whole Nemotron model: where the weights are, and which of them a run does not use."""

from __future__ import annotations

from mimo.protocols import LANGUAGE, MegatronSource
from providers.common.hybrid import HybridConfig

FLAG = "--load-nemotron-checkpoint"
# Keys that do not concern the weights of any of the models.
IGNORED = ((r"\._extra_state$", "state of Transformer Engine's layers"),)
MTP = (r"^language_model\.mtp\.", "layers of multi-token prediction, which --hybrid-layer-pattern does not have")
ENCODER = (r"^vision_(model|projection)\.", "encoder and projector, which a text model does not have")


def nemotron_source(path: str, config: HybridConfig, vision: dict[str, dict[str, str]] | None = None) -> MegatronSource:
    """Return where the parts of a model are in such a checkpoint.

    Args:
        path: value of --load-nemotron-checkpoint.
        config: resolved sizes.
        vision: `prefixes` of the encoder's module; None for a text model, which skips encoder and projector.
    """
    passed_over = (*IGNORED, *(() if config.num_mtp_depths else (MTP,)), *(() if vision else (ENCODER,)))
    return MegatronSource(path, FLAG, {**(vision or {}), LANGUAGE: {"": "language_model."}}, passed_over)
