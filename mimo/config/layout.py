"""Flags that place modules on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayoutConfig:
    """Grids: which ranks hold the encoder, which the language model, and how each is split."""

    layout: Literal["disjoint", "colocated"] = "disjoint"
    """disjoint: encoder and language ranks differ; colocated: every rank holds both, each with its own tp and dp."""
    llm_only: bool = False
    """Train the language model alone, on text. A data set with images is refused."""
    encoder_tp: int = 1
    """Tensor parallel size of the encoder."""
    encoder_dp: int = 1
    """Data parallel size of the encoder."""
    encoder_pp: int = 1
    """Pipeline stages of the encoder."""
    llm_offset: int | None = None
    """First rank of the language grid; left out: right after the encoder (disjoint) or 0."""
    llm_tp: int = 1
    """Tensor parallel size of the language model."""
    llm_cp: int = 1
    """Context parallel size of the language model; only 1 for now."""
    llm_pp: int = 1
    """Pipeline stages of the language model."""
    llm_dp: int = 1
    """Data parallel size of the language model, the number of data lanes."""
    llm_ep: int = 1
    """Expert parallel size of the language model."""
    llm_expt_tp: int = 1
    """Tensor parallel size inside an expert."""
    sequence_parallel: bool = False
    """Sequence parallelism in the language model; needs --llm-tp above 1, and MoE with --llm-tp above 1 needs it."""
