"""Multi-token prediction (arXiv:2412.19437, section 2.2) behind the last pipeline stage of a hybrid decoder.

Depth k combines the hidden state of token t with the embedding of token t + k and predicts token t + k + 1. The layers
are Megatron Core's. It asks `parallel_state` where the layers are, for the groups, and for the reduction of the
reported loss; several grids cannot share that state, so all of this is given here.

With images, a prediction counts only if every token that it reads beyond t, and the one that it predicts, is text. The
embedding of a placeholder says nothing about the image. Later tokens still attend to it, but no gradient reaches it
(NVIDIA/Megatron-LM #6010 and #6770).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.data.batch import ContextPart, Microbatch, TextBatch


@dataclass(frozen=True)
class MtpInputs:
    """Tokens of a microbatch in the form that multi-token prediction reads.

    Attributes:
        input_ids: int64 `[b, s]`.
        labels: int64 `[b, s]`, the next token.
        loss_mask: float32 `[b, s]`, 1 where the label is a target.
        is_text: bool `[b, s]`, False where an encoder's row takes the token's place.
        ends: int64 `[sequences]`, position of each sequence's last token in a packed row; None: each row is one.
        part: the tokens of this rank if context-parallel ranks share the rows. All other attributes cover whole rows,
            because the successor of a rank's token may belong to another rank.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    is_text: torch.Tensor
    ends: torch.Tensor | None
    part: ContextPart | None = None

    @classmethod
    def of(cls, text: TextBatch) -> MtpInputs:
        """Make them from the language side of a microbatch, on its device, without waiting for the device."""
        samples, length = text.input_ids.shape
        is_text = torch.ones(length * samples, dtype=torch.bool, device=text.input_ids.device)
        for positions in text.placeholders.values():
            is_text.index_fill_(0, positions, False)
        ends = None if text.packed is None else text.packed.cu_seqlens[1:].long() - 1
        return cls(text.input_ids, text.labels, text.loss_mask, is_text.view(length, samples).t(), ends,
                   text.part)

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Select this rank's tokens, `[b, s]` to `[b, s / cp]`."""
        return values if self.part is None else values.index_select(-1, self.part.index)

    def shifted(self, values: torch.Tensor) -> torch.Tensor:
        """Shift `[b, s]` by one token: each position gets its successor's value, and the last of a sequence gets 0."""
        moved = values.roll(-1, dims=-1)
        if self.ends is None:
            moved[..., -1] = 0
        else:
            moved.index_fill_(-1, self.ends, 0)
        return moved

    def target_masks(self, depths: int) -> list[torch.Tensor]:
        """Return a mask for each depth, float32 `[b, s]`, which is 1 where its prediction counts."""
        masks = []
        mask, following = self.loss_mask, self.shifted(self.is_text)
        path = following
        for _ in range(depths):
            mask, following = self.shifted(mask), self.shifted(following)
            path = path & following
            masks.append(mask * path)
        return masks


class MtpLayer(MultiTokenPredictionLayer):
    """One depth. Its stack recomputes its own activations if recomputation is on."""

    def forward(self, hidden_states: torch.Tensor, decoder_input: torch.Tensor,
                packed_seq_params: PackedSeqParams | None, padding_mask: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states of this depth.

        Args:
            hidden_states: those of the depth before, `[s, b, h]`, with sequence parallelism this rank's part of `s`.
            decoder_input: embeddings of the tokens that this depth adds, of the same shape.
            packed_seq_params: starts of the sequences of a packed row.
            padding_mask: tokens that routers ignore.
        """
        return self._proj_and_transformer_layer(hidden_states, decoder_input, packed_seq_params=packed_seq_params,
                                                padding_mask=padding_mask)


class MtpBlock(MultiTokenPredictionBlock):
    """All depths, and their loss.

    Args:
        config: `mtp_loss_scaling_factor` is the weight of the mean loss of the depths.
        stack: layers of every kind.
        pattern: symbols of the layers of one depth.
        depths: number of depths.
        groups: process groups.

    Attributes:
        targets: float64 `[depths]`, target tokens of the global batch of the step.
        loss_sums: float64 `[depths]`, sums of the losses of this rank's counted predictions since `begin_step`.
    """

    def __init__(self, config: TransformerConfig, stack: HybridStackSubmodules, pattern: str, depths: int,
                 groups: ProcessGroupCollection) -> None:
        layers = [replace(layer, module=MtpLayer) for layer in stack.mtp_block_spec.submodules.layer_specs]
        super().__init__(config, MultiTokenPredictionBlockSubmodules(layer_specs=layers), pg_collection=groups,
                         mtp_layer_pattern=pattern, mtp_num_depths=depths, hybrid_submodules=stack, name="mtp")
        self.tp_group = groups.tp
        self.targets: torch.Tensor | None = None
        self.loss_weights: torch.Tensor | None = None
        self.loss_sums: torch.Tensor | None = None
        for depth, layer in enumerate(self.layers):
            for part in layer.modules():
                if isinstance(part, MoELayer):
                    # Megatron Core reports their losses as those of the decoder's first layers. A depth is one entry.
                    part.set_layer_number(config.num_layers + 1 + depth)

    def begin_step(self, targets: torch.Tensor) -> None:
        """Prepare for the microbatches of a step.

        Args:
            targets: float64 `[1 + depths]` on the device: target tokens of the decoder and of each depth, over the
                global batch.
        """
        # All losses are divided by the decoder's targets (`LossScale`); each depth's loss is a mean over its own.
        counts = targets.clamp(min=1)
        self.targets = targets[1:]
        self.loss_weights = (self.mtp_loss_scaling_factor / len(self.layers) * counts[0] / counts[1:]).float()
        self.loss_sums = torch.zeros(len(self.layers), dtype=torch.float64, device=targets.device)

    def forward(self, hidden_states: torch.Tensor, inputs: MtpInputs, embedding: LanguageModelEmbedding,
                packed_seq_params: PackedSeqParams | None, padding_mask: torch.Tensor | None = None
                ) -> list[torch.Tensor]:
        """Return the hidden states of every depth, each `[s, b, h]`, given the decoder's."""
        assert not embedding.scatter_to_sequence_parallel, "embeddings are scattered here"
        found = []
        input_ids, is_text = inputs.input_ids, inputs.is_text
        for layer in self.layers:
            input_ids, is_text = inputs.shifted(input_ids), inputs.shifted(is_text)
            # No position embedding: attention layers of a hybrid decoder have none.
            embedded = embedding(input_ids=inputs.own(input_ids), position_ids=None)
            embedded = torch.where(inputs.own(is_text).t()[..., None], embedded, embedded.detach())
            if self.config.sequence_parallel:
                embedded = scatter_to_sequence_parallel_region(embedded, group=self.tp_group)
                if self.config.clone_scatter_output_in_embedding:
                    embedded = embedded.clone()  # the part is a view, which would keep the whole row
            hidden_states = layer(hidden_states, embedded, packed_seq_params, padding_mask)
            found.append(hidden_states)
        return found

    def attach_losses(self, hidden_states: torch.Tensor, predictions: list[torch.Tensor], inputs: MtpInputs,
                      loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the decoder's hidden states so that the gradient of every depth's loss flows through them, too.

        Args:
            hidden_states: hidden states of the decoder, `[s, b, h]`.
            predictions: results of `forward`.
            inputs: the tokens.
            loss_of: computes losses `[b, s]` from labels `[b, s]` and hidden states `[s, b, h]`.
        """
        assert self.loss_weights is not None and self.loss_sums is not None, "begin_step comes first"
        labels = inputs.labels
        for depth, mask in enumerate(inputs.target_masks(len(self.layers))):
            labels = inputs.shifted(labels)
            losses = loss_of(inputs.own(labels), predictions[depth]).float() * inputs.own(mask)
            self.loss_sums[depth] += losses.detach().sum()
            hidden_states = MTPLossAutoScaler.apply(hidden_states, losses * self.loss_weights[depth])
        return hidden_states


def begin_mtp_step(mtp: MtpBlock | None, microbatches: Sequence[Microbatch], groups: ProcessGroupCollection | None,
                   device: torch.device) -> None:
    """Tell multi-token prediction the target tokens of the global batch. Collective over the last stage's lanes.

    Args:
        mtp: multi-token prediction of this rank; None does nothing.
        microbatches: this rank's side of the step, on the host.
        groups: the language grid's process groups.
        device: device of the model.
    """
    if mtp is None:
        return
    assert groups is not None, "multi-token prediction is on the language grid"
    # Targets of the decoder, then of each depth.
    counts = torch.zeros(1 + len(mtp.layers), dtype=torch.float64)
    for batch in microbatches:
        assert batch.text is not None, "language ranks hold text"
        inputs = MtpInputs.of(batch.text)
        counts += torch.stack([mask.sum(dtype=torch.float64)
                               for mask in (inputs.loss_mask, *inputs.target_masks(len(mtp.layers)))])
    targets = counts.to(device)
    # Not summed over context-parallel ranks, because each of them counts the targets of whole rows.
    dist.all_reduce(targets, group=groups.dp)
    mtp.begin_step(targets)


def mtp_losses(mtp: MtpBlock | None, groups: ProcessGroupCollection | None) -> dict[str, float]:
    """Return `mtp_<depth> loss` of the step, each a mean over the depth's targets of the global batch.

    Collective over the last stage's lanes. The result is empty on ranks without multi-token prediction.
    """
    if mtp is None:
        return {}
    assert groups is not None and mtp.loss_sums is not None and mtp.targets is not None, "a step was made"
    sums = mtp.loss_sums.clone()
    dist.all_reduce(sums, group=groups.dp_cp)
    means = sums / mtp.targets.clamp(min=1)
    return {f"mtp_{depth + 1} loss": mean for depth, mean in enumerate(means.tolist())}
