"""Seconds of the transfers between the workers of a simulated iteration. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from mimo.grid.dry_run import bridge_bytes, bridge_width
from mimo.grid.spec import GridSpec
from mimo.planner.costs import LATENCY_S
from mimo.planner.shapes import num_layers
from mimo.planner.workload import Microbatches, SampleSize, longest_in_windows

if TYPE_CHECKING:
    from mimo.planner.predict import Step


def transfers(step: Step, batch: Microbatches) -> Callable[[Hashable], float]:
    """Return a function from the key of a transfer, which workers of an iteration post, to its seconds."""
    return _Transfers(step, batch).seconds


class _Transfers:
    """Transfers of one iteration: rows between stages, and tokens of images from encoders and back."""

    def __init__(self, step: Step, batch: Microbatches) -> None:
        self.step, self.batch, self.costs = step, batch, step.costs
        self.lengths = step.lengths(batch)
        if step.layout.encoder_window is not None and step.layout.encoders:
            # A worker of such a layout stands for all lanes.
            self.lengths = [longest_in_windows(self.lengths, step.windows(batch).schedule.windows)]

    def seconds(self, key: Hashable) -> float:
        """Return the seconds of the transfer with this key, which takes as long in both directions."""
        match key:
            # A range is a sequence of integers, too, so it comes before pairs of these.
            case (range() as lanes, _, int() as microbatch):
                moved = max(self._image_bytes(self.batch[microbatch][lane]) for lane in lanes)
                language = self.step.layout.language
                leaves_node = len(lanes) * language.tp * language.cp > self.costs.gpu.gpus_per_node
            case (("bridge", int() as replica, int() as lane), _, int() as microbatch):
                moved, leaves_node = self._over_bridge(replica, lane, microbatch)
            case ((("encoder", int() as replica), int() as stage), _, int() as microbatch):
                moved, leaves_node = self._between_encoder_stages(replica, stage, microbatch)
            case ((int() as lane, int() as stage), _, int() as microbatch):
                moved, leaves_node = self._between_stages(lane, stage, microbatch)
            case (_, int() as window):
                moved = self._of_window(window)
                leaves_node = self.step.layout.world_size > self.costs.gpu.gpus_per_node
            case _:
                raise AssertionError(key)
        bandwidth = self.costs.gpu.network_gb_s if leaves_node else self.costs.gpu.link_gb_s
        return LATENCY_S + moved / (bandwidth * 1e9)

    def _between_stages(self, lane: int, stage: int, microbatch: int) -> tuple[float, bool]:
        """Return the bytes that a rank of a language stage sends, and whether the next stage is on another node."""
        grid, config = self.step.layout.language, self.step.config
        tokens = config.train.micro_batch_size * self.lengths[lane][microbatch]
        moved = tokens * self.costs.hidden_size * self.costs.number_bytes / grid.cp
        return moved / (grid.tp if config.layout.sequence_parallel else 1), self._next_leaves_node(grid, stage)

    def _between_encoder_stages(self, replica: int, stage: int, microbatch: int) -> tuple[float, bool]:
        """Return the same of a rank of an encoder, whose tensor-parallel ranks all send whole patches."""
        (encoder,) = self.step.sampled.encoders
        patch_bytes = self.costs.encoder(encoder.name, encoder.tp).recomputed_bytes / num_layers(
            self.costs.shapes[encoder.name])
        patches = sum(self.costs.image_patches(encoder.name, tokens) for share in self.step.shares(encoder, replica)
                      for tokens in self.step.images(self.batch[microbatch][share.lane][share.start : share.stop]))
        return patches * patch_bytes, self._next_leaves_node(self.step.layout.encoders[0], stage)

    def _over_bridge(self, replica: int, lane: int, microbatch: int) -> tuple[float, bool]:
        """Return the bytes between an encoder replica and a lane for the busiest rank, and whether they leave its node.

        Every tensor-parallel rank of the lane needs all of them. They cross nodes once, and ranks of a node gather what
        several of them get; see `mimo.bridge.disjoint.sends_whole_pieces`.
        """
        (encoder,), language, node = self.step.layout.encoders, self.step.layout.language, self.costs.gpu.gpus_per_node
        samples = [sample for share in self.step.shares(self.step.sampled.encoders[0], replica) if share.lane == lane
                   for sample in self.batch[microbatch][lane][share.start : share.stop]]
        last = encoder.rank_at(pp=encoder.pp - 1)
        ranks = (*range(last, last + encoder.tp * encoder.dp),
                 *range(language.offset, language.offset + language.size // language.pp))
        moved, leaves_node = self._image_bytes(samples), len({rank // node for rank in ranks}) > 1
        if leaves_node:
            return moved / min(encoder.tp, language.tp), True
        return moved * (1 + (max(language.tp / encoder.tp, 1.0) - 1) / language.tp), False

    def _of_window(self, window: int) -> float:
        """Return the bytes of a window's images that a rank of the language model needs, at most."""
        members = self.step.windows(self.batch).schedule.windows[window]
        return max(sum(self._image_bytes(self.batch[microbatch][lane]) for microbatch in members)
                   for lane in range(self.step.sampled.num_lanes))

    def _image_bytes(self, samples: Sequence[SampleSize]) -> float:
        """Return the bytes of the features of some samples that a context-parallel rank needs."""
        config, (encoder,) = self.step.config, self.step.layout.encoders
        width = bridge_width(self.costs.provider, config.model_family, encoder.name)
        return bridge_bytes(image_tokens=sum(self.step.images(samples)), hidden_size=width,
                            dtype_bytes=int(self.costs.number_bytes)) / self.step.layout.language.cp

    def _next_leaves_node(self, grid: GridSpec, stage: int) -> bool:
        """Return whether any rank of a stage sends to one of another node."""
        first, size, node = grid.rank_at(pp=stage), grid.size // grid.pp, self.costs.gpu.gpus_per_node
        return any(rank // node != (rank + size) // node for rank in range(first, first + size))
