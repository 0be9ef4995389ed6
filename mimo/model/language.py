"""Decoders: Megatron Core's `GPTModel` and `HybridModel` with a padded vocabulary on the language grid's groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from mimo.model.attention import ContextParallelAttention, PackedDotProductAttention
from mimo.model.layer_specs import check_impl, norm_builder
from mimo.model.moe import LocalMoELayer
from mimo.model.mtp import MtpBlock, MtpInputs
from mimo.model.torch_layers.norms import Norm
from mimo.model.vocabulary import Embedding, OutputLayer, TokenFunction


class PaddedVocabulary(LanguageModule):
    """Base class of both kinds of decoder, listed before Megatron Core's class.

    Embedding and output rows from `true_vocab_size` on stand for no token. Their logits are the least finite number, so
    that they are never the largest, their probability is exactly zero and no gradient reaches them.
    """

    vocab_size: int
    true_vocab_size: int
    mtp_process: bool
    logits_chunk: int | None = None
    """Most tokens whose logits are in memory at a time; None: all tokens of a microbatch."""

    def set_true_vocab_size(self, true_vocab_size: int) -> None:
        """Set how many rows stand for tokens. `vocab_size` counts the padding rows, too."""
        assert 0 < true_vocab_size <= self.vocab_size, f"{true_vocab_size} tokens in {self.vocab_size} rows"
        self.true_vocab_size = true_vocab_size
        if self.post_process:
            OutputLayer.widen(self.output_layer)
        if hasattr(self, "embedding"):
            Embedding.widen(self.embedding.word_embeddings)

    def token_values(self, hidden: torch.Tensor, function: TokenFunction) -> tuple[torch.Tensor, ...]:
        """Apply a function to the logits of all tokens, `logits_chunk` of them at a time.

        Args:
            hidden: output of the layers, `[s, b, h]`; with sequence parallelism this rank's part of `s`.
            function: the function.

        Returns:
            The function's results, `[b, s]` each.
        """
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        scaled = replace(function, compute=lambda logits, *inputs: function.compute(self._scale_logits(logits),
                                                                                    *inputs))
        found: tuple[torch.Tensor, ...] = self.output_layer(hidden, weight, function=scaled, chunk=self.logits_chunk)
        return found

    def token_losses(self, labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, `[b, s]`, from labels `[b, s]` and hidden states."""
        return self.token_values(hidden, TokenFunction(self.losses_of_logits, (labels,)))[0]

    def losses_of_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the loss of each token, as a `TokenFunction` does."""
        return (self.compute_language_model_loss(labels.t(), logits).t(),)

    def _scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        # The loss and the returned logits both pass through this method.
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
        """Save the last stage's copy of a tied embedding as a replica of the first stage's; changes the dict in place.

        Megatron Core's method does the same, but takes the rank from global state that several grids cannot share.
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


class MultimodalRotaryEmbedding(torch.nn.Module):
    """Rotary angles of positions with three axes: each frequency follows time, row or column.

    Megatron Core has only contiguous sections of frequencies. This class also has interleaved ones, and uses no global
    state.

    Args:
        kv_channels: channels of a head.
        rotary_base: base of the frequencies.
        sections: frequencies of each axis; they sum to half of `kv_channels`.
        interleaved: whether the axes take turns (time, row, column, time, ...), as in Qwen3-VL, where frequencies that
            rows and columns leave follow time; otherwise each axis has a contiguous section, as in Qwen2.5-VL.
    """

    def __init__(self, kv_channels: int, rotary_base: float, sections: Sequence[int], *, interleaved: bool) -> None:
        super().__init__()
        assert len(sections) == 3 and sum(sections) * 2 == kv_channels, f"sections {sections} of {kv_channels} channels"
        device = torch.cuda.current_device()
        exponents = torch.arange(0, kv_channels, 2, dtype=torch.float32, device=device) / kv_channels
        self.inv_freq = 1.0 / rotary_base**exponents
        self.axes = torch.tensor(_axes_of_frequencies(sections, interleaved=interleaved), device=device)

    def forward(self, position_ids: torch.Tensor, mrope_section: list[int], cp_group: Any = None) -> torch.Tensor:
        """Return the angles of every token, float32 `[s, b, 1, kv_channels]`.

        Args:
            position_ids: int64 `[3, b, s]`.
            mrope_section: no effect; `GPTModel` passes its configuration's.
            cp_group: None or one rank, because `position_ids` belong to this rank's tokens already.
        """
        assert cp_group is None or cp_group.size() == 1, "positions of three axes are not split over a sequence's ranks"
        assert position_ids.ndim == 3 and len(position_ids) == 3, f"three axes, not {list(position_ids.shape)}"
        angles = position_ids.float()[self.axes].permute(2, 1, 0) * self.inv_freq
        return torch.cat((angles, angles), dim=-1)[:, :, None]


def _axes_of_frequencies(sections: Sequence[int], *, interleaved: bool) -> list[int]:
    """Return the axis (0 time, 1 row, 2 column) that each frequency follows."""
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    return [index % 3 if index < 3 * sections[index % 3] else 0 for index in range(sum(sections))]


class LanguageModel(PaddedVocabulary, GPTModel):
    """A decoder of equal layers.

    Args:
        true_vocab_size: number of tokens.
        interleaved_sections: with positions of three axes (`position_embedding_type` is `mrope`), whether the axes take
            turns among the frequencies.
        model: arguments of `GPTModel`.
    """

    def __init__(self, *, true_vocab_size: int, interleaved_sections: bool = False, **model: Any) -> None:
        super().__init__(**model)
        if self.position_embedding_type == "mrope":
            self.rotary_pos_emb = MultimodalRotaryEmbedding(
                self.config.kv_channels, self.rotary_base, self.config.mrope_section, interleaved=interleaved_sections)
        self.set_true_vocab_size(true_vocab_size)

    def forward(self, *, labels: torch.Tensor | None = None, function: TokenFunction | None = None,
                **inputs: Any) -> Any:
        """Extend Megatron Core's method: compute the logits of `logits_chunk` tokens at a time.

        Args:
            labels: int64 `[b, s]`; the result is the loss of each token.
            function: without labels, the result is this function's, instead of the logits of all tokens.
            inputs: further arguments of `GPTModel.forward`.
        """
        if labels is not None:
            return super().forward(**inputs, output_processor=lambda hidden_states, **_: self.token_losses(
                labels, hidden_states))
        if function is not None:
            return super().forward(**inputs, output_processor=lambda hidden_states, **_: self.token_values(
                hidden_states, function))
        return super().forward(**inputs)


class HybridLanguageModel(PaddedVocabulary, HybridModel):
    """A decoder whose layers follow a pattern of Mamba-2, attention, MoE and dense layers.

    Args:
        true_vocab_size: number of tokens.
        hybrid_layer_pattern: pattern in the form of `HybridModel`. Layers after a slash are those of multi-token
            prediction, on the last pipeline stage. Megatron Core would place them by global state that several grids
            cannot share.
        model: further arguments of `HybridModel`.
    """

    def __init__(self, *, true_vocab_size: int, hybrid_layer_pattern: str, **model: Any) -> None:
        # Megatron Core's constructor calls the overridden method below, which reads `mtp_patterns`.
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

    def forward(self, *, labels: torch.Tensor | None = None, function: TokenFunction | None = None,
                packed_seq_params: PackedSeqParams | None = None, mtp_inputs: MtpInputs | None = None,
                decoder_input: torch.Tensor | None = None, padding_mask: torch.Tensor | None = None,
                **inputs: Any) -> Any:
        """Replace Megatron Core's method; without labels, multi-token prediction does not run.

        Args:
            labels: int64 `[b, s]`; the result is the loss of each token.
            function: without labels, the result is this function's, instead of the logits of all tokens.
            packed_seq_params: starts of the sequences of a packed row.
            mtp_inputs: tokens for multi-token prediction, given with `labels` to a stage that has it.
            decoder_input: embeddings `[s, b, h]` on the first stage.
            padding_mask: tokens that routers ignore.
            inputs: further arguments of `HybridModel.forward`, which have no effect on the last stage.
        """
        if not self.post_process:
            return super().forward(labels=labels, packed_seq_params=packed_seq_params, decoder_input=decoder_input,
                                   padding_mask=padding_mask, **inputs)
        # Layers of a hybrid decoder take no position embeddings.
        hidden = self.decoder(hidden_states=decoder_input, attention_mask=None, packed_seq_params=packed_seq_params,
                              padding_mask=padding_mask)
        if labels is not None:
            if self.mtp_process:
                assert mtp_inputs is not None, "multi-token prediction reads the tokens"
                predictions = self.mtp(hidden, mtp_inputs, self.embedding, packed_seq_params, padding_mask)
                hidden = self.mtp.attach_losses(hidden, predictions, mtp_inputs, self.token_losses)
            return self.token_losses(labels, hidden)
        if function is not None:
            return self.token_values(hidden, function)
        logits, _ = self.output_layer(hidden, self.shared_embedding_or_output_weight()
                                      if self.share_embeddings_and_output_weights else None)
        return self._scale_logits(logits).transpose(0, 1).contiguous()


# Layers of a hybrid decoder (Mamba-2, attention, experts, dense MLP), with Transformer Engine or in plain PyTorch.


class Stack(HybridStack):
    """Megatron Core's stack, with a final norm of the same implementation as its layers."""

    def __init__(self, config: TransformerConfig, submodules: HybridStackSubmodules, *, post_layer_norm: bool = True,
                 **stack: Any) -> None:
        super().__init__(config, submodules, post_layer_norm=False, **stack)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = norm_builder(config.transformer_impl)(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def hybrid_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a stack with layers of every kind, from which the pattern chooses.

    Args:
        config: `transformer_impl`, `num_moe_experts` and `moe_grouped_gemm` are read.

    Raises:
        ValueError: unknown implementation.
    """
    impl = config.transformer_impl
    check_impl(impl)
    if impl == "transformer_engine":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as fused

        return replace(fused, module=Stack)
    return ModuleSpec(module=Stack, submodules=_local_layers(config))


def _local_layers(config: TransformerConfig) -> HybridStackSubmodules:
    """Return layers in plain PyTorch, with separate norms.

    In checkpoints, the norms have the names that they have in Transformer Engine's layers, which fuse most of them.
    """
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(
        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear))
    attention = ModuleSpec(
        module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, linear_proj=RowParallelLinear, core_attention=(
                ContextParallelAttention if config.context_parallel_size > 1 else PackedDotProductAttention)))
    dense = partial(MLP.as_mlp_submodule,
                    submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    experts = None
    if config.num_moe_experts:
        # Megatron Core's builder of an MoE layer, with our class in it.
        builder = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts,
                                      moe_grouped_gemm=config.moe_grouped_gemm)
        experts = ModuleSpec(module=MoETransformerLayer, submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm, mlp_bda=get_bias_dropout_add, mlp=partial(LocalMoELayer, **builder.keywords)))
    # A depth of multi-token prediction has norms and a projection; its layers come from the pattern.
    depth = ModuleSpec(module=MultiTokenPredictionLayer, submodules=MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=Norm))
    return HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(
            norm=Norm, mixer=mixer, mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"})),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(
            input_layernorm=Norm, self_attention=attention, self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"})),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm, mlp=dense, mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"})),
        moe_layer=experts,
        mtp_block_spec=ModuleSpec(module=MultiTokenPredictionBlock,
                                  submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[depth])))
