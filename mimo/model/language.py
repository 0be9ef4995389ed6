"""Decoders: the wheel's `GPTModel` and `HybridModel` with a padded vocabulary and checkpoint names from own groups."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint


class PaddedVocabulary(LanguageModule):
    """What both kinds of decoder share; a base class of each, before the wheel's.

    Embedding and output rows from `true_vocab_size` on stand for no token: their logits are the least finite number, so
    they are never the largest one, their probability is exactly zero and no gradient reaches them.
    """

    vocab_size: int
    true_vocab_size: int

    def set_true_vocab_size(self, true_vocab_size: int) -> None:
        """Say how many rows stand for tokens, at most `vocab_size`, which counts the padding rows too."""
        assert 0 < true_vocab_size <= self.vocab_size, f"{true_vocab_size} tokens in {self.vocab_size} rows"
        self.true_vocab_size = true_vocab_size

    def _scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        # The one place that loss and returned logits have in common.
        logits = super()._scale_logits(logits)
        rows = logits.size(-1)
        first = 0 if rows == self.vocab_size else self.tp_group.rank() * rows
        if first + rows <= self.true_vocab_size:
            return logits
        padding = torch.arange(first, first + rows, device=logits.device) >= self.true_vocab_size
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min)

    def tie_embeddings_and_output_weights_state_dict(
        self, sharded_state_dict: ShardedStateDict, output_layer_weight_key: str, first_stage_word_emb_key: str,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """The last stage's copy of a tied embedding as a replica of the first stage's, in place.

        As the wheel's method, which takes the rank from global state that several grids cannot share.
        """
        if not self.post_process or self.pre_process:
            assert self.pre_process or output_layer_weight_key not in sharded_state_dict, list(sharded_state_dict)
            return
        data_parallel = self.pg_collection.dp_cp
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.shared_embedding_or_output_weight(), key=first_stage_word_emb_key,
            # A copy of the first stage's, on the same tensor-parallel rank.
            replica_id=(1, 0, data_parallel.rank()), allow_shape_mismatch=True, tp_group=self.tp_group,
            dp_cp_group=data_parallel)


class LanguageModel(PaddedVocabulary, GPTModel):
    """A decoder of equal layers.

    Args:
        true_vocab_size: number of tokens.
        model: arguments of `GPTModel`.
    """

    def __init__(self, *, true_vocab_size: int, **model: Any) -> None:
        super().__init__(**model)
        self.set_true_vocab_size(true_vocab_size)


class HybridLanguageModel(PaddedVocabulary, HybridModel):
    """A decoder whose layers follow a pattern of Mamba-2, attention, MoE and dense layers.

    Args:
        true_vocab_size: number of tokens.
        model: arguments of `HybridModel`.
    """

    def __init__(self, *, true_vocab_size: int, **model: Any) -> None:
        super().__init__(**model)
        self.set_true_vocab_size(true_vocab_size)
