"""Decoders: the wheel's `GPTModel` and `HybridModel` with a padded vocabulary and checkpoint names from own groups."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from mimo.model.mtp import MtpBlock, MtpInputs


class PaddedVocabulary(LanguageModule):
    """What both kinds of decoder share; a base class of each, before the wheel's.

    Embedding and output rows from `true_vocab_size` on stand for no token: their logits are the least finite number, so
    they are never the largest one, their probability is exactly zero and no gradient reaches them.
    """

    vocab_size: int
    true_vocab_size: int
    mtp_process: bool

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
        if self.mtp_process:
            # The same parameter as the copy of the embedding, which is in the state already.
            del sharded_state_dict[output_layer_weight_key]
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
        hybrid_layer_pattern: as `HybridModel` takes it. Layers after a slash are multi-token prediction's, which the
            wheel would place by global state that several grids cannot share; they are on the last pipeline stage.
        model: further arguments of `HybridModel`.
    """

    def __init__(self, *, true_vocab_size: int, hybrid_layer_pattern: str, **model: Any) -> None:
        # The wheel's constructor calls the overridden method below, which needs it.
        layers, *self.mtp_patterns = hybrid_layer_pattern.split("/")
        super().__init__(hybrid_layer_pattern=layers, **model)
        self.set_true_vocab_size(true_vocab_size)

    def setup_embeddings_and_output_layer(self) -> None:
        """Build multi-token prediction, if this stage has it, and agree on copies of the embedding."""
        if self.mtp_patterns and self.post_process:
            if not self.pre_process:
                self.embedding = LanguageModelEmbedding(
                    config=self.config, vocab_size=self.vocab_size, max_sequence_length=self.max_sequence_length,
                    position_embedding_type=self.position_embedding_type, scatter_to_sequence_parallel=False,
                    tp_group=self.pg_collection.tp)
                if self.share_embeddings_and_output_weights:
                    self.embedding.word_embeddings.weight = self.output_layer.weight
            self.mtp = MtpBlock(self.config, self.hybrid_stack_spec.submodules, self.mtp_patterns[0],
                                len(self.mtp_patterns), self.pg_collection)
            self.mtp_process = True
        super().setup_embeddings_and_output_layer()

    def forward(self, *, labels: torch.Tensor | None = None, packed_seq_params: PackedSeqParams | None = None,
                mtp_inputs: MtpInputs | None = None, decoder_input: torch.Tensor | None = None,
                **inputs: Any) -> torch.Tensor:
        """As the wheel's method; without labels, multi-token prediction does not run.

        Args:
            labels: int64 `[b, s]`; None: the result is logits.
            packed_seq_params: where the sequences of a packed row start.
            mtp_inputs: tokens for multi-token prediction, given with `labels` to a stage that has it.
            decoder_input: embeddings `[s, b, h]` on the first stage.
            inputs: further arguments of `HybridModel.forward`, all without effect on a stage with multi-token
                prediction.
        """
        if not self.mtp_process:
            return super().forward(labels=labels, packed_seq_params=packed_seq_params, decoder_input=decoder_input,
                                   **inputs)
        hidden = self.decoder(hidden_states=decoder_input, attention_mask=None, packed_seq_params=packed_seq_params)
        if labels is None:
            return self._logits(hidden).transpose(0, 1).contiguous()
        assert mtp_inputs is not None, "multi-token prediction reads the tokens"
        predictions = self.mtp(hidden, mtp_inputs, self.embedding, packed_seq_params)
        hidden = self.mtp.attach_losses(hidden, predictions, mtp_inputs, self._losses)
        return self._losses(labels, hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self._scale_logits(self.output_layer(hidden, weight=weight)[0])

    def _losses(self, labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.compute_language_model_loss(labels, self._logits(hidden))
