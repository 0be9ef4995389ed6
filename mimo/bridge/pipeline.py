"""Communicator for Megatron Core's 1F1B schedule: stage neighbours inside a module, the bridge between modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mimo.bridge.disjoint import Bridge
from mimo.bridge.handshake import Owners, destination_rows, order_by_owner, source_rows
from mimo.data.batch import Microbatch
from mimo.grid.groups import Grids
from mimo.observability.spans import ScheduleSpans
from mimo.protocols import LANGUAGE


@dataclass(frozen=True)
class StageShapes:
    """Shapes of the language model's hidden states between stages, besides the lengths of rows.

    Attributes:
        split: ranks that share the tokens of a row: those of context parallelism times those of sequence parallelism.
        before: columns of what comes from the previous stage. Levels of features (`mimo.model.deepstack`) are columns.
        after: columns of what goes to the next stage.
    """

    split: int
    before: int
    after: int


class KnownShapeP2P(P2PCommunicator):
    """Stage-to-stage transfers of shapes that both sides know.

    Megatron Core's variable-length mode, which multi-module schedules insist on, sends each shape over the device first
    and synchronises twice a transfer. Here, all stages of a lane have the rows of its microbatches.

    Args:
        pp_group: the module's pipeline group.
        config: Megatron config of the module.
        shapes: what does not depend on the microbatch.
    """

    def __init__(self, pp_group: torch.distributed.ProcessGroup, config: ModelParallelConfig, shapes: StageShapes
                 ) -> None:
        super().__init__(pp_group, config)
        self._shapes = shapes
        self.begin_step(())

    def begin_step(self, rows: Sequence[torch.Size]) -> None:
        """Give the shape `[b, s]` of the rows of each microbatch of the coming schedule."""
        self._rows = rows
        # Microbatches that have come from the previous stage and gone to the next one, and their gradients that have
        # come from the next stage and gone to the previous one. 1F1B keeps their order.
        self._received = self._sent = self._gradients_received = self._gradients_sent = 0

    def _shape(self, microbatch: int, columns: int) -> list[int]:
        samples, length = self._rows[microbatch]
        return [length // self._shapes.split, samples, columns]

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        before, after = self._shapes.before, self._shapes.after
        if tensor_send_next is not None:
            self._check(tensor_send_next, self._shape(self._sent, after))
            self._sent += 1
        if tensor_send_prev is not None:
            self._check(tensor_send_prev, self._shape(self._gradients_sent, before))
            self._gradients_sent += 1
        previous: list[int] = []
        following: list[int] = []
        if recv_prev:
            previous = self._shape(self._received, before)
            self._received += 1
        if recv_next:
            following = self._shape(self._gradients_received, after)
            self._gradients_received += 1
        return previous, following

    def _check(self, tensor: torch.Tensor, shape: list[int]) -> None:
        assert list(tensor.shape) == shape, f"{tuple(tensor.shape)} is not {shape}"


class PipelineCommunicator(MultiModulePipelineCommunicator):
    """Megatron Core's multi-module communicator over our bridges.

    Args:
        grids: process groups.
        config: Megatron config whose `pipeline_dtype` is the dtype of activations.
        bridges: one per encoder, in module order.
        language_shapes: shapes of the language model's hidden states.
        schedule_spans: records where a backward pass begins and ends.

    Attributes:
        after_backward: called after every backward pass, before its gradient is sent.
        before_backward: called while the pipeline drains, before a gradient is received.
    """

    def __init__(
        self, grids: Grids, config: ModelParallelConfig, bridges: Sequence[Bridge],
        language_shapes: StageShapes, schedule_spans: ScheduleSpans,
    ) -> None:
        self.bridges, self.schedule_spans = list(bridges), schedule_spans
        self.after_backward: Callable[[], None] = lambda: None
        self.before_backward: Callable[[], None] = lambda: None
        topology = {bridge.module: [LANGUAGE] for bridge in bridges} | {LANGUAGE: []}
        super().__init__(
            # Encoders without a bridge run beside the pipeline (`mimo.training.encoder_windows`).
            {name: grids.grids[name] for name in topology},
            topology,
            config,
            dim_mapping={"s": 0, "b": 1, "h": 2},
            module_output_ndim={bridge.module: 2 for bridge in bridges},
        )
        self.grids = grids
        self.stages: KnownShapeP2P | None = None
        if LANGUAGE in self.rank_module_map:
            self.stages = KnownShapeP2P(grids.collections[LANGUAGE].pp, config, language_shapes)
            self.rank_module_map[LANGUAGE].p2p_communicator = self.stages

    def _build_bridge_comms(self) -> None:
        self.bridge_comms = self.bridges

    @property
    def current_stage(self) -> int:
        """Stage of this rank in the whole chain.

        The schedule derives from it how many forward passes come before the first backward pass. An encoder that runs
        ahead has more of them, as if it were that many stages earlier.
        """
        stage: int = super().current_stage
        ahead = 0 if LANGUAGE in self.rank_module_map else max(bridge.microbatches_ahead for bridge in self.bridges)
        return stage - ahead

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank holds the first stage of a module of its own.

        Megatron Core means the first stage of the whole chain, and its schedule starts overlapped gradient reduction in
        the last microbatch only there, so language ranks would never overlap. The first stage of every module has no
        later work behind which its reduction could hide, so each starts early. The schedule uses this property for
        nothing else here.
        """
        return any(info.pp_rank == 0 for info in self.rank_module_map.values())

    # Megatron Core's schedule runs a backward pass after one of the first two methods and before one of the last two,
    # and calls nothing else of this object in between.

    def send_forward_recv_backward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Do as Megatron Core does, and record that a backward pass begins."""
        gradients: dict[str, torch.Tensor] = super().send_forward_recv_backward(*args, **kwargs)
        self.schedule_spans.begin_backward()
        return gradients

    def recv_backward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Do as Megatron Core does, and record that a backward pass begins.

        The schedule calls this only while the pipeline drains.
        """
        self.before_backward()
        gradients: dict[str, torch.Tensor] = super().recv_backward(*args, **kwargs)
        self.schedule_spans.begin_backward()
        return gradients

    def send_backward(self, *args: Any, **kwargs: Any) -> None:
        """Record that a backward pass has ended, then do as Megatron Core does."""
        self.schedule_spans.end_backward()
        self.after_backward()
        super().send_backward(*args, **kwargs)

    def send_backward_recv_forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Record that a backward pass has ended, then do as Megatron Core does."""
        self.schedule_spans.end_backward()
        self.after_backward()
        received: dict[str, torch.Tensor] = super().send_backward_recv_forward(*args, **kwargs)
        return received

    def begin_step(self, microbatches: Sequence[Microbatch], owners: Mapping[str, Owners]) -> None:
        """Tell every bridge of this rank how many rows each microbatch of the coming schedule moves.

        `owners` are those of `Handshake`.
        """
        layout, rank = self.grids.layout, self.grids.rank
        for bridge in self.bridges:
            if rank in layout.grids[bridge.module].ranks and bridge.module in owners:
                sorted_rows = [order_by_owner(each, layout.language.cp) for each in owners[bridge.module]]
                bridge.begin_step([counts for counts, _ in sorted_rows],
                                  [torch.from_numpy(order) for _, order in sorted_rows])
            elif rank in layout.grids[bridge.module].ranks:
                bridge.begin_step(source_rows(bridge.module, microbatches))
            elif rank in layout.language.ranks:
                bridge.begin_step(destination_rows(bridge.module, layout, rank, microbatches))

    def begin_rows(self, microbatches: Sequence[Microbatch]) -> None:
        """Tell the stages of the language model how long the rows of each microbatch of the coming schedule are."""
        if self.stages is not None:
            self.stages.begin_step([batch.text.input_ids.shape for batch in microbatches if batch.text is not None])

    def finish_step(self, *, forward_only: bool) -> None:
        """Wait until everything that the bridges of this rank have sent has been received."""
        for bridge in self.bridges:
            bridge.finish_step(forward_only=forward_only)

    def destroy(self) -> None:
        for bridge in self.bridges:
            bridge.destroy()
