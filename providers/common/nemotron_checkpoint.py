"""Megatron checkpoints of a Nemotron model as one: whose weights a run takes, and what of theirs it has no use for."""

from __future__ import annotations

from mimo.protocols import LANGUAGE, MegatronSource
from providers.common.hybrid import HybridConfig

FLAG = "--load-nemotron-checkpoint"
# Keys that say nothing about weights of any of the models.
IGNORED = ((r"\._extra_state$", "state of Transformer Engine's layers"),)
MTP = (r"^language_model\.mtp\.", "layers of multi-token prediction, which --hybrid-layer-pattern does not have")
ENCODER = (r"^vision_(model|projection)\.", "encoder and projector, which a text model does not have")


def nemotron_source(path: str, config: HybridConfig, vision: dict[str, dict[str, str]] | None = None) -> MegatronSource:
    """Where the names of a model's parts are in such a checkpoint.

    Args:
        path: value of --load-nemotron-checkpoint.
        config: resolved sizes.
        vision: `prefixes` of the encoder's module; None for a text model, which passes over encoder and projector.
    """
    passed_over = (*IGNORED, *(() if config.num_mtp_depths else (MTP,)), *(() if vision else (ENCODER,)))
    return MegatronSource(path, FLAG, {**(vision or {}), LANGUAGE: {"": "language_model."}}, passed_over)
