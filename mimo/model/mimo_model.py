"""The multimodal model on one rank: Megatron Core's `MimoModel` fed with microbatches of uneven, known sizes.

It differs from Megatron Core's model in three ways. Token counts come from the batch, so that aligning image rows with
their placeholders does not wait for the device. The colocated bridge takes uneven counts. A text-only language model
can have pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from megatron.core.enums import ModelType
from megatron.core.models.mimo.config import MimoModelConfig
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.utils import unwrap_model

from mimo.bridge.colocated import ColocatedBridge
from mimo.data.batch import EncoderBatch, Microbatch, TextBatch
from mimo.grid.groups import Grids
from mimo.model import compat
from mimo.model.attention import packed_seq_params
from mimo.model.language import HybridLanguageModel, PaddedVocabulary
from mimo.model.mtp import MtpBlock, MtpInputs
from mimo.model.submodule import FeatureQueue
from mimo.model.vocabulary import TokenFunction
from mimo.observability.spans import Kind, Spans, Trace
from mimo.protocols import LANGUAGE
from mimo.watchdog.watchdog import Watchdog


class FeatureWindows(Protocol):
    """Features of microbatches that are encoded several at a time."""

    def before_forward(self) -> dict[str, torch.Tensor]:
        """Return the features of the coming microbatch by encoder, on the first language stage."""
        ...

    def after_forward(self) -> None:
        """Run the encoder work that is due after a forward pass."""
        ...

    def destroy(self) -> None:
        ...


# Makes the `TokenFunction` of a microbatch from its language side, on the device.
FunctionOfText = Callable[[TextBatch], TokenFunction]


class HeteroModel(MimoModel):
    """The modules of this rank, and how a microbatch runs through them.

    Args:
        mimo_config: specs of all modules, their grids and placeholder ids.
        grids: process groups.
        watchdog: watches the waits of the colocated bridge.
        spans: records these waits, and where one module's work ends and another's begins.
        seed_module: called with a module's name before its parameters are made.

    Attributes:
        prefetch: features that this rank's encoder has computed ahead; None if it does not.
        windows: encodes the images of several microbatches together; None: each forward pass encodes its own.
        few_shapes: whether packed rows are described with few different shapes, for CUDA graphs.
    """

    def __init__(
        self, mimo_config: MimoModelConfig, grids: Grids, watchdog: Watchdog, spans: Spans,
        seed_module: Callable[[str], None],
    ) -> None:
        # Megatron Core's constructor calls the overridden methods below, which need these.
        self.grids, self.watchdog, self.spans, self.seed_module = grids, watchdog, spans, seed_module
        self._holds_several = len(grids.modules) > 1
        self.prefetch: FeatureQueue | None = None
        self.windows: FeatureWindows | None = None
        self.few_shapes = False
        groups = grids.collections.get(LANGUAGE)
        super().__init__(mimo_config, cp_group=groups.cp if groups else None, tp_group=groups.tp if groups else None)
        if self.partition_adapter is not None:
            # Each rank embeds its own tokens only. Megatron Core would merge whole rows and cut them afterwards.
            self.partition_adapter.cfg = replace(self.partition_adapter.cfg, use_cp=False)
        # Megatron Core's schedule without pipelining reads it.
        self.model_type = ModelType.encoder_or_decoder
        self.input_tensors: Mapping[str, torch.Tensor] | None = None

    def _initialize_submodules(self) -> None:
        if self.grids.layout.language.pp > 1 and not (self.grids.bridged and self.grids.layout.encoders):
            # Megatron Core ignores the pipeline of grids on the same ranks, and a single grid counts as such.
            self.role = compat.role_from_grids(self.mimo_config.module_to_grid_map)
        for name in self.role.modality_module_names:
            # Seeded one by one, so that an encoder's parameters do not depend on which others share its rank.
            self.seed_module(name)
            spec, stage = self.mimo_config.modality_submodules_spec[name], self.role.modules[name]
            self.modality_submodules[name] = spec.module.from_spec(
                spec, is_first_stage=stage.is_first_stage, is_last_stage=stage.is_last_stage
            )

    def _initialize_language_model(self) -> None:
        if self.role.has_language_module:
            self.seed_module(LANGUAGE)
        super()._initialize_language_model()
        cp = self.grids.layout.language.cp
        if self.language_model is not None and self.language_model.config.context_parallel_size != cp:
            raise ValueError(f"--llm-cp {cp}: the model provider built {type(self.language_model).__name__} with "
                             f"context_parallel_size {self.language_model.config.context_parallel_size}, so it does "
                             "not support context parallelism; use --llm-cp 1")

    @property
    def mtp(self) -> MtpBlock | None:
        """Multi-token prediction, on ranks that have it."""
        language = unwrap_model(self.language_model) if self.role.has_language_module else None
        return language.mtp if isinstance(language, HybridLanguageModel) and language.mtp_process else None

    def _build_colocated_communicators(self) -> None:
        layout = self.grids.layout
        # Nothing moves if every context-parallel rank has its own copy of the encoder.
        if layout.encoder_window is not None or (layout.kind == "homogeneous" and layout.language.cp > 1):
            return
        for name in self.mimo_config.modality_submodules_spec:
            self.colocated_comms[name, LANGUAGE] = ColocatedBridge(self.grids, name, Trace(self.watchdog, self.spans))

    def destroy(self) -> None:
        """Release the process groups of bridges and windows."""
        super().destroy()
        if self.windows is not None:
            self.windows.destroy()

    def forward(self, batch: Microbatch, with_labels: bool = True, function: FunctionOfText | None = None) -> Any:
        """Run one microbatch through the modules of this rank.

        Args:
            batch: this rank's side of the microbatch, on the device.
            with_labels: whether the last language stage returns losses instead of logits.
            function: a function of logits, whose results the last language stage returns instead of either.

        Returns:
            `{module: activations}` on ranks whose output goes to another rank. On the last language stage, the loss of
            each token, float32 `[b, s]`, or vocabulary-parallel logits of all tokens `[b, s, vocab / tp]`, or the
            tensors of `function`, `[b, s]`.
        """
        received, self.input_tensors = self.input_tensors, None
        received = received or {}
        if self.windows is not None:
            output = self._language(batch, {**received, **self.windows.before_forward()}, with_labels, function)
            self.windows.after_forward()
            return output
        if not self.grids.bridged and self.grids.layout.encoders:
            rows = {name: self._encode(name, side, None) for name, side in batch.encoders.items()}
            for (name, _), bridge in self.colocated_comms.items():
                rows[name] = bridge.communicate(rows[name])
            return self._language(batch, {**received, **rows}, with_labels, function)
        if self.role.has_modality_modules:
            return {name: self._encode(name, side, received.get(name)) for name, side in batch.encoders.items()}
        return self._language(batch, received, with_labels, function)

    def _encode(self, name: str, side: EncoderBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run one encoder on this rank. Returns `[rows, hidden]` on its last stage, and hidden states on the others."""
        submodule = self.modality_submodules[name]
        inner = unwrap_model(submodule)
        inputs: dict[str, Any]
        if self.prefetch is not None and self.prefetch.active:
            inputs = {"features": self.prefetch.take(side), "encoder_inputs": side.inputs}
        else:
            inputs = {"encoder_inputs": side.normalised_inputs() or None, "hidden_states": hidden}
        with self.spans.span(Kind.FORWARD, "forward", module=name) if self._holds_several else nullcontext():
            output = submodule(**inputs)
        if inner.is_last_stage and output.shape[0] != sum(side.token_counts):
            raise ValueError(
                f"{name} made {output.shape[0]} tokens for samples {', '.join(side.keys)}, whose images have "
                f"{list(side.token_counts)} placeholders"
            )
        if self._holds_several and self.spans.active and output.requires_grad:
            # Autograd calls it when the backward pass of everything after this output is over.
            output.register_hook(lambda gradient: self.spans.switch(name))
        return output

    def _language(
        self, batch: Microbatch, received: Mapping[str, torch.Tensor], with_labels: bool,
        function: FunctionOfText | None,
    ) -> Any:
        text = batch.text
        assert text is not None, "language ranks hold text"
        packed, length = text.packed, text.input_ids.shape[1]
        # Without the part, each rank would take the whole row for its own tokens, with wrong positions and no error.
        assert (text.part is None) == (self.grids.layout.language.cp == 1), "mimo.data.batch.with_part adds the part"
        # Megatron Core makes `max_seqlen` rotary positions. With as many as the row has tokens, `apply_packed_rotary`
        # would take them for those of the row and not restart them at each sample.
        assert packed is None or packed.max_seqlen < length or len(packed.cu_seqlens) == 2, (packed, length)
        embeddings = None
        if self.role.is_first_stage(LANGUAGE):
            embeddings = self._merge(text, received)
        labels = text.own(text.labels)
        # The tokens are already those of this context-parallel rank, so this splits only for sequence parallelism.
        embeddings, labels, _, _ = self._shard_language_inputs(embeddings, labels, text.loss_mask)
        if embeddings is None:
            unwrap_model(self.language_model).set_input_tensor(received[LANGUAGE])
        elif self.config.sequence_parallel and self.config.clone_scatter_output_in_embedding:
            # The part is a view, which would keep the whole row with all levels in memory until the pass is over.
            embeddings = embeddings.clone()
        is_last, with_labels = self.role.is_last_stage(LANGUAGE), with_labels and function is None
        further: dict[str, Any] = {}
        if self.mtp is not None and with_labels:
            further["mtp_inputs"] = MtpInputs.of(text)
        # A provider's own language model may not accept such functions.
        reduces = isinstance(unwrap_model(self.language_model), PaddedVocabulary)
        if function is not None and is_last and reduces:
            further["function"] = function(text)
        output = self.language_model(
            input_ids=None,
            position_ids=text.own(text.position_ids),
            attention_mask=None,
            decoder_input=embeddings,
            labels=labels if with_labels else None,
            packed_seq_params=packed_seq_params(packed, text.part, few_shapes=self.few_shapes),
            padding_mask=self._padding(text),
            **further,
        )
        if function is not None and is_last and not reduces:
            return function(text).of(output.transpose(0, 1).contiguous())
        return output if is_last else {LANGUAGE: output}

    def _padding(self, text: TextBatch) -> torch.Tensor | None:
        """Return the padding that routers ignore in this rank's part of the rows, bool `[b, s / cp / tp]`, or None."""
        config = self.config
        if text.padding is None or not config.num_moe_experts:
            return None
        padding = text.own(text.padding)
        if not config.sequence_parallel:
            return padding
        # Megatron Core selects the part of the row only if it also embeds the tokens.
        group = self.grids.collections[LANGUAGE].tp
        return padding.chunk(group.size(), dim=1)[group.rank()]

    def _merge(self, text: TextBatch, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return word embeddings with each placeholder replaced by its encoder row.

        The result is `[s / cp, b, (1 + levels) * hidden]`. The levels of an encoder (`mimo.model.deepstack`) come after
        the embeddings and are zero for text. A context-parallel rank gets the rows of its own tokens. In a homogeneous
        layout it has encoded all rows of its lane and selects those of its tokens.
        """
        embedding = unwrap_model(self.language_model).embedding
        merged = embedding(input_ids=text.own(text.input_ids), position_ids=text.own(text.position_ids))
        width = max((encoded.shape[1] for encoded in rows.values()), default=merged.shape[-1])
        merged = _widened(merged, width)
        length, samples, _ = merged.shape
        for name, encoded in rows.items():
            part, positions = text.part, text.placeholders[name]
            makes_all = self.grids.layout.kind == "homogeneous"
            if part is not None and not makes_all:
                positions = part.slots[name]
            if positions.numel() != encoded.shape[0]:
                raise ValueError(
                    f"samples {', '.join(text.keys)} have {positions.numel()} {name} placeholders, but the "
                    f"encoder sent {encoded.shape[0]} tokens"
                )
            if part is not None and makes_all:
                positions, encoded = part.slots[name], encoded.index_select(0, part.rows[name])
            # Even no rows are copied: the colocated bridge's backward pass is collective, so it must be in every graph.
            encoded = _widened(encoded.to(merged.dtype), width)
            merged = merged.reshape(-1, width).index_copy(0, positions, encoded).view(length, samples, width)
        return merged


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Append columns of zeros up to `width`."""
    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
