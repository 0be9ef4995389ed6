"""Encode the images of several microbatches together, on all ranks of a colocated layout.

The language model may have pipeline stages: every rank encodes, features go to the first language stage of their lanes,
and their gradients come back after its backward passes. A window of microbatches is encoded just before it is needed,
so the number of images whose activations are kept does not grow with the batch (`mimo.grid.windows`).

The gradient of a sum over images does not depend on where an image is encoded: the encoder's data-parallel reduction
adds up all replicas in float32, and losses were divided by the number of target tokens of the global batch before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch

from mimo.bridge.colocated import FEATURES, GRADIENTS, PIXELS, Exchange
from mimo.bridge.handshake import require_same_samples
from mimo.comm import gather_results, raise_known_errors
from mimo.data.batch import Microbatch, normalised
from mimo.data.encoder_inputs import join_images, split_images
from mimo.grid.groups import Grids
from mimo.grid.lanes import lanes_read_by
from mimo.grid.spec import GridSpec
from mimo.grid.windows import Image, WindowSchedule, busiest_turns, deal_in_order, deal_iteration, encoding_cost
from mimo.observability.spans import Kind, Trace
from mimo.training.encoder_activations import LayerRecomputation
from mimo.visual import Normalisation


class Encoder(Protocol):
    """An encoder of this rank, wrapped or not."""

    def __call__(self, *, encoder_inputs: dict[str, Any] | None, hidden_states: None) -> torch.Tensor:
        """Encode images `[rows, hidden]`, as `mimo.model.submodule.VisionSubmodule`."""
        ...


@dataclass
class _Encoded:
    """Output of this rank for one window, and the features that its lane got.

    Attributes:
        outputs: output of each chunk of images, with its graph.
        kept: bytes of layer activations that the graphs hold, as far as a budget counts them.
        leaves: features `[rows, hidden]` of each microbatch of this rank's lane, which collect gradients; on the first
            language stage only.
    """

    outputs: list[torch.Tensor]
    kept: int = 0
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)


class ModuleWindows:
    """One encoder in windows: which replica encodes which image, and this rank's part of that.

    Args:
        encoder: the module's grid.
        module: the encoder itself.
        grids: process groups.
        exchange: carries pixels, features and gradients.
        hidden_size: columns of the features.
        encoder_hidden_size: width of the encoder, for the cost of an image.
        dtype: dtype of pixels, features and gradients; 8-bit pixels travel as they are.
        device: this rank's device.
        needs_grad: whether any part of the encoder or its projector trains.
        chunk: most images in one forward pass of the encoder; 0: all that the replica has in a window.
        balanced: whether images are dealt by cost. If not, they are dealt in order, the same number to each replica.
        backward: cost of an image's backward pass, in units of that of its forward pass.
        recomputation: chooses the layers that are recomputed; None: the encoder does as it was built.

    Attributes:
        largest: cost of the busiest replica of each turn, summed over the turns of the iteration.
        largest_in_order: the same if images were dealt in order.
        mean: cost of the iteration, per replica.
    """

    def __init__(self, encoder: GridSpec, module: Encoder, grids: Grids, exchange: Exchange, *, hidden_size: int,
                 encoder_hidden_size: int, dtype: torch.dtype, device: torch.device, needs_grad: bool, chunk: int,
                 balanced: bool, backward: float, recomputation: LayerRecomputation | None = None) -> None:
        self.name, self._module, self._grids, self._exchange = encoder.name, module, grids, exchange
        self._recomputation = recomputation
        self._encoder, self._language = encoder, grids.layout.language
        self._hidden_size, self._encoder_hidden_size = hidden_size, encoder_hidden_size
        self.dtype, self.device, self._needs_grad, self._chunk = dtype, device, needs_grad, chunk
        self._balanced = balanced
        self._backward = backward
        self._place = encoder.coordinates(grids.rank)
        language = self._language.coordinates(grids.rank)
        self._lane, self._language_tp, self._language_cp = language["dp"], language["tp"], language["cp"]
        self._is_first_stage = language["pp"] == 0
        # Images of each window in the order of microbatch, lane and row, each with the replica that encodes it.
        self._windows: list[list[tuple[Image, int]]] = []
        # Pixels of this rank's lane on the host, of the windows whose pixels have not been sent.
        self._pixels: dict[int, list[torch.Tensor]] = {}
        # How 8-bit pixels of the iteration are normalised; None if pixels are floats.
        self._normalisation: Normalisation | None = None
        # Pixels of this replica's images by window, from `spread_pixels` to `encode`.
        self._received: dict[int, list[torch.Tensor]] = {}
        self._encoded: dict[int, _Encoded] = {}
        # By window, from `spread_gradients` to `finish`, and by sending rank: rows of this replica's output, and their
        # gradients.
        self._gradients: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._forward_only = False
        self.largest = self.largest_in_order = self.mean = 0.0

    def begin_step(self, images: Sequence[Image], pixels: Sequence[torch.Tensor], schedule: WindowSchedule,
                   forward_only: bool) -> None:
        """Deal the images of an iteration.

        Args:
            images: the images of all lanes, in the order of microbatch, lane and row; all have one normalisation.
            pixels: the pixels of this rank's lane, on the host, in the same order; empty if this rank reads no lane.
            schedule: windows of the iteration.
            forward_only: whether no backward pass follows.
        """
        self._forward_only = forward_only
        self._normalisation = images[0].normalisation if images else None
        self._encoded.clear()
        self._received.clear()
        self._gradients.clear()
        windows: list[list[Image]] = [[] for _ in range(len(schedule.windows))]
        for image in images:
            windows[schedule.window_of[image.microbatch]].append(image)
        costs = [[encoding_cost(image, self._encoder_hidden_size) for image in window] for window in windows]
        replicas, backward = self._encoder.dp, 0.0 if forward_only else self._backward
        in_order = [deal_in_order(each, replicas) for each in costs]
        owners = deal_iteration(costs, schedule, replicas, backward=backward) if self._balanced else in_order
        self._windows = [list(zip(*each, strict=True)) for each in zip(windows, owners, strict=True)]
        self.largest, self.largest_in_order = (
            busiest_turns(costs, each, schedule, replicas, backward=backward) for each in (owners, in_order))
        self.mean = sum(map(sum, costs)) * (1 + backward) / replicas
        own = iter(pixels)
        self._pixels = {window: [next(own) for _ in self._of_lane(window)] if len(pixels) else []
                        for window in range(len(schedule.windows))}

    def peers(self) -> dict[str, tuple[set[int], set[int]]]:
        """Return the ranks to which this rank sends in the iteration, and those from which it receives, by message."""
        rank, found = self._grids.rank, {what: (set[int](), set[int]()) for what in (PIXELS, FEATURES, GRADIENTS)}

        def note(what: str, sender: int, receiver: int) -> None:
            if sender == rank != receiver:
                found[what][0].add(receiver)
            if receiver == rank != sender:
                found[what][1].add(sender)

        for lane, replica in {(image.lane, owner) for window in self._windows for image, owner in window}:
            for tp in range(self._encoder.tp):
                encodes = self._encoder.rank_at(dp=replica, tp=tp)
                note(PIXELS, self._language.rank_at(dp=lane), encodes)
                for cp in range(self._language.cp):
                    note(GRADIENTS, self._language.rank_at(dp=lane, tp=tp % self._language.tp, cp=cp), encodes)
            for tp, cp in product(range(self._language.tp), range(self._language.cp)):
                note(FEATURES, self._encoder.rank_at(dp=replica, tp=tp % self._encoder.tp),
                     self._language.rank_at(dp=lane, tp=tp, cp=cp))
        return found

    def spread_pixels(self, window: int) -> None:
        """Send the pixels of this rank's lane to the replicas that encode them, and receive those of this replica.

        Until a reader sends them, it holds them on the host. Both ends of a message have to agree on the dtype: 8-bit
        pixels are normalised by the replica, and the loader's floats are float32 whatever the encoder computes in.
        """
        dtype = self.dtype if self._normalisation is None else torch.uint8
        mine = self._of_replica(window, self._place["dp"])
        by_replica: dict[int, list[torch.Tensor]] = {}
        held = self._pixels.pop(window)
        for (_, replica), pixels in zip(self._of_lane(window) if held else [], held, strict=True):
            by_replica.setdefault(replica, []).append(
                pixels.to(self.device, non_blocking=True).to(dtype).reshape(-1))
        sends = {self._encoder.rank_at(dp=replica, tp=tp): message
                 for replica, parts in by_replica.items() for message in (torch.cat(parts),)
                 for tp in range(self._encoder.tp)}
        by_replica.clear()
        lanes = sorted({image.lane for image in mine})
        sizes = {lane: [_elements(image) for image in mine if image.lane == lane] for lane in lanes}
        receives = {self._language.rank_at(dp=lane): torch.empty(sum(sizes[lane]), dtype=dtype, device=self.device)
                    for lane in lanes}
        self._exchange.staged(PIXELS, sends, receives)
        split = {lane: iter(receives[self._language.rank_at(dp=lane)].split(sizes[lane])) for lane in lanes}
        self._received[window] = [next(split[image.lane]).view(image.shape) for image in mine]

    def encode(self, window: int) -> None:
        """Run this replica's images of a window through the encoder."""
        if window not in self._received:
            self.spread_pixels(window)
        mine, outputs, pixels = self._of_replica(window, self._place["dp"]), [], self._received.pop(window)
        chunk = self._chunk or len(mine)
        parts = [slice(start, start + chunk) for start in range(0, len(mine), chunk or 1)]
        elements = [sum(map(_elements, mine[part])) for part in parts]
        recomputation = None if self._forward_only or not self._needs_grad else self._recomputation
        kept = [] if recomputation is None else recomputation.choose(elements)
        for index, part in enumerate(parts):
            sizes = [image.size for image in mine[part]]
            with (contextlib.nullcontext() if recomputation is None
                  else recomputation.keeping(kept[index][0], elements[index])):
                inputs = normalised(join_images(pixels[part], sizes), self._normalisation, self.dtype)
                output = self._module(encoder_inputs=inputs, hidden_states=None)
            tokens = sum(image.tokens for image in mine[part])
            if output.shape[0] != tokens:
                raise ValueError(f"{self.name} made {output.shape[0]} tokens of images of {sizes} pixels, whose "
                                 f"samples ask for {tokens}")
            outputs.append(output)
        self._encoded[window] = _Encoded(outputs, sum(count for _, count in kept))

    def spread_features(self, window: int) -> None:
        """Send the features of this replica's images to their lanes, and receive those of this rank's lane."""
        mine = self._of_replica(window, self._place["dp"])
        rows = torch.cat([output.detach() for output in self._encoded[window].outputs] or [self._rows(0)])
        sends = {}
        for lane, cp in product(sorted({image.lane for image in mine}), range(self._language.cp)):
            # Rows of a lane lie one behind the other in its message.
            message = rows.index_select(0, self._places(mine, lane, cp))
            for tp in range(self._language.tp):
                if tp % self._encoder.tp == self._place["tp"]:
                    sends[self._language.rank_at(dp=lane, tp=tp, cp=cp)] = message
        # Rows of each image of this rank's lane that belong to its own tokens, by the replica that encodes it.
        tokens_by_replica: dict[int, list[int]] = {}
        for image, replica in self._of_lane(window) if self._is_first_stage else ():
            tokens_by_replica.setdefault(replica, []).append(image.tokens_of(self._language_cp))
        sources = {replica: self._encoder.rank_at(dp=replica, tp=self._language_tp % self._encoder.tp)
                   for replica in tokens_by_replica}
        receives = {sources[replica]: self._rows(sum(tokens)) for replica, tokens in tokens_by_replica.items()}
        self._exchange.staged(FEATURES, sends, receives)
        if not self._is_first_stage:
            return
        # A replica's message has the images in their order. Sort them by microbatch and row.
        left = {replica: iter(receives[sources[replica]].split(tokens))
                for replica, tokens in tokens_by_replica.items()}
        by_microbatch: dict[int, list[torch.Tensor]] = {}
        for image, replica in self._of_lane(window):
            by_microbatch.setdefault(image.microbatch, []).append(next(left[replica]))
        collects = self._needs_grad and not self._forward_only and torch.is_grad_enabled()
        self._encoded[window].leaves = {
            microbatch: torch.cat(parts).requires_grad_(collects) for microbatch, parts in by_microbatch.items()}

    def features(self, window: int, microbatch: int) -> torch.Tensor:
        """Return the features `[rows, hidden]` of a microbatch of this rank's lane; no rows without images."""
        leaves = self._encoded[window].leaves
        if microbatch not in leaves:
            leaves[microbatch] = self._rows(0).requires_grad_(self._needs_grad and not self._forward_only)
        return leaves[microbatch]

    def spread_gradients(self, window: int) -> None:
        """Send the gradients of a window's features in this rank's lane, and receive those of this replica's images."""
        if self._forward_only or not self._needs_grad or window in self._gradients:
            return
        sends = {}
        if self._is_first_stage:
            for replica, parts in self._gradients_by_replica(window, self._encoded[window]).items():
                message = torch.cat(parts)
                for tp in range(self._encoder.tp):
                    if tp % self._language.tp == self._language_tp:
                        sends[self._encoder.rank_at(dp=replica, tp=tp)] = message
        mine, places, receives = self._of_replica(window, self._place["dp"]), {}, {}
        for lane, cp in product(sorted({image.lane for image in mine}), range(self._language.cp)):
            source = self._language.rank_at(dp=lane, tp=self._place["tp"] % self._language.tp, cp=cp)
            places[source] = self._places(mine, lane, cp)
            receives[source] = self._rows(len(places[source]))
        self._exchange.staged(GRADIENTS, sends, receives)
        self._gradients[window] = {source: (places[source], receives[source]) for source in receives}

    def finish(self, window: int) -> None:
        """Run the encoder's backward pass of a window."""
        self.spread_gradients(window)
        encoded, gradients = self._encoded.pop(window), self._gradients.pop(window, {})
        if not gradients:
            return
        whole = self._rows(sum(output.shape[0] for output in encoded.outputs))
        for where, received in gradients.values():
            whole.index_copy_(0, where, received)
        parts = whole.split([output.shape[0] for output in encoded.outputs])
        pairs = [(output, gradient) for output, gradient in zip(encoded.outputs, parts, strict=True)
                 if output.requires_grad]
        # One after the other: in a common backward pass autograd would add up the gradients of all chunks first, but
        # not those of recomputed layers, and sums of float32 depend on the order.
        for output, gradient in reversed(pairs):
            output.backward(gradient)
        if self._recomputation is not None:
            self._recomputation.release(encoded.kept)

    def _gradients_by_replica(self, window: int, encoded: _Encoded) -> dict[int, list[torch.Tensor]]:
        """Gradients of this rank's lane, image by image, for the replica that encoded each."""
        left: dict[int, Any] = {}
        for microbatch, leaf in encoded.leaves.items():
            tokens = [image.tokens_of(self._language_cp) for image, _ in self._of_lane(window)
                      if image.microbatch == microbatch]
            if not tokens:
                continue
            # None: the loss of this microbatch does not depend on its images.
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            left[microbatch] = iter(gradient.split(tokens))
        found: dict[int, list[torch.Tensor]] = {}
        for image, replica in self._of_lane(window):
            found.setdefault(replica, []).append(next(left[image.microbatch]))
        return found

    def _of_replica(self, window: int, replica: int) -> list[Image]:
        return [image for image, owner in self._windows[window] if owner == replica]

    def _of_lane(self, window: int) -> list[tuple[Image, int]]:
        return [(image, owner) for image, owner in self._windows[window] if image.lane == self._lane]

    def _places(self, images: Sequence[Image], lane: int, cp: int) -> torch.Tensor:
        """Find the rows of a context-parallel rank of a lane among those of `images`, int64."""
        first, found = 0, [np.zeros(0, np.int64)]
        for image in images:
            if image.lane == lane:
                own = (np.flatnonzero(np.frombuffer(image.owners, np.uint8) == cp) if image.owners
                       else np.arange(image.tokens))
                found.append(first + own)
            first += image.tokens
        places = torch.from_numpy(np.concatenate(found))
        # A copy from memory that is not page-locked could make the host wait for the device.
        return (places.pin_memory() if self.device.type == "cuda" else places).to(self.device, non_blocking=True)

    def _rows(self, count: int) -> torch.Tensor:
        return torch.empty((count, self._hidden_size), dtype=self.dtype, device=self.device)


def _elements(image: Image) -> int:
    return math.prod(image.shape)


def images_of(microbatches: Sequence[Microbatch], module: str, lane: int, rank: int) -> list[Image]:
    """List the images of a lane that this rank reads.

    Raises:
        ValueError: the text and the images of a microbatch do not belong together; names the samples.
    """
    found = []
    for index, batch in enumerate(microbatches):
        text, side = batch.text, batch.encoders[module]
        assert text is not None, "the reader of a lane holds its text"
        require_same_samples(list(zip(text.keys, text.token_counts[module], strict=True)),
                             list(zip(side.keys, side.token_counts, strict=True)), module, rank, lane, index)
        pixels = split_images(side.inputs)
        if len(pixels) != len(text.image_lengths[module]):
            raise ValueError(f"samples {', '.join(text.keys)} (lane {lane}, microbatch {index}): their text has "
                             f"{len(text.image_lengths[module])} images of {module}, their pixels are those of "
                             f"{len(pixels)}")
        owners, first = b"" if text.part is None else text.part.owners[module].numpy().tobytes(), 0
        for tokens, (size, each) in zip(text.image_lengths[module], pixels, strict=True):
            found.append(Image(lane, index, tokens, size, tuple(each.shape), owners[first:first + tokens],
                               side.normalisation))
            first += tokens
    return found


class EncoderWindows:
    """Windows of all encoders of a rank, driven by the forward passes of its language model.

    A window has `size` microbatches; 0: all of the iteration.
    """

    def __init__(self, grids: Grids, modules: Sequence[ModuleWindows], exchange: Exchange, size: int,
                 trace: Trace) -> None:
        self._grids, self._modules, self.exchange, self._size, self._trace = grids, modules, exchange, size, trace
        place = grids.layout.language.coordinates(grids.rank)
        self._stage, self._is_first_stage = place["pp"], place["pp"] == 0
        self._schedule = WindowSchedule(1, 0, 1, 0)
        self._next = self._next_backward = 0

    def begin_step(self, microbatches: Sequence[Microbatch], *, forward_only: bool) -> list[Microbatch]:
        """Start the passes of an iteration: tell all ranks which images there are, and encode the first windows.

        Returns:
            The microbatches without what encoders read of them.

        Raises:
            ValueError: text and images of a lane do not belong together; names the sample.
            ReportedElsewhereError: as above, on other ranks than the lane's reader.
        """
        self.exchange.begin_step()
        size, language = self._size or len(microbatches), self._grids.layout.language
        self._schedule = WindowSchedule(size, self._stage, language.pp, len(microbatches), forward_only,
                                        together=self._grids.layout.encoder_spans_stages)
        self._next = self._next_backward = 0
        reads = bool(lanes_read_by(self._grids.layout, self._grids.rank))
        lane = language.coordinates(self._grids.rank)["dp"]
        with self._trace.wait("images of all lanes", group=range(self._grids.layout.world_size)):
            everyone = gather_results(self._grids, lambda: {
                module.name: images_of(microbatches, module.name, lane, self._grids.rank) if reads else []
                for module in self._modules})
        for module in self._modules:
            images = [image for found in everyone for image in found[module.name]]
            # A stable sort: the rows of a lane stay in order.
            images.sort(key=lambda image: (image.microbatch, image.lane))
            several = sorted({str(image.normalisation) for image in images})
            if len(several) > 1:
                raise_known_errors(self._grids, [
                    f"images of {module.name} have the normalisations {' and '.join(several[:2])} in one iteration; "
                    "the data set must give all of them one, or all as float32"] * len(everyone))
            pixels = [pixels for batch in microbatches if reads
                      for _, pixels in split_images(batch.encoders[module.name].inputs)]
            module.begin_step(images, pixels, self._schedule, forward_only)
            for what, (sends, receives) in module.peers().items():
                self.exchange.link(what, sends, receives)
        # All at once, because a later stage encodes some of them only after the first stage's first passes.
        self._spread_pixels(self._schedule.first_windows)
        # Here and not in the first forward pass: a later stage first waits for what the first stage makes of these.
        self._take_turn([], self._schedule.at_start())
        return [replace(batch, encoders={}) for batch in microbatches]

    def before_forward(self) -> dict[str, torch.Tensor]:
        """Encode and finish the windows whose turn it is; return the features of the coming forward pass.

        Returns:
            Features `[rows, hidden]` by encoder, on the first language stage; empty on later ones.
        """
        forward = self._next
        self._spread_features(self._schedule.sends_before(forward))
        self._take_turn(*self._schedule.before(forward))
        if not self._is_first_stage:
            return {}
        window = self._schedule.window_of[forward]
        return {module.name: module.features(window, forward) for module in self._modules}

    def after_forward(self) -> None:
        """Encode and finish the windows whose turn it is after the forward pass that has just run."""
        self._spread_features(self._schedule.sends_after(self._next))
        self._take_turn(*self._schedule.after(self._next))
        self._next += 1

    def before_backward(self) -> None:
        """Finish the windows whose turn it is before the next gradient is received, while the pipeline drains."""
        self._take_turn(*self._schedule.before_backward(self._next_backward))

    def after_backward(self) -> None:
        """Encode and finish the windows whose turn it is after the backward pass that has just run."""
        for window, module in product(self._schedule.takes_after_backward(self._next_backward), self._modules):
            module.spread_gradients(window)
        self._take_turn(*self._schedule.after_backward(self._next_backward))
        self._next_backward += 1

    def finish_step(self) -> None:
        """Run the backward passes that are left after those of the language model."""
        assert self._next == self._schedule.num_microbatches, (self._next, self._schedule)
        self._take_turn(self._schedule.at_end(), [])
        self.exchange.flush()

    @property
    def imbalance(self) -> tuple[float, float] | None:
        """Cost of the busiest replicas over the mean in the last iteration, as dealt and if images were dealt in order.

        None without images.
        """
        mean = sum(module.mean for module in self._modules)
        if not mean:
            return None
        return (sum(module.largest for module in self._modules) / mean,
                sum(module.largest_in_order for module in self._modules) / mean)

    def _spread_pixels(self, windows: list[int]) -> None:
        for window, module in product(windows, self._modules):
            module.spread_pixels(window)

    def _spread_features(self, windows: list[int]) -> None:
        for window, module in product(windows, self._modules):
            module.spread_features(window)

    def _take_turn(self, finished: list[int], encoded: list[int]) -> None:
        if finished:
            # So that replicas with fewer images to finish can go on to the others.
            self._spread_pixels(encoded)
        for window, module in product(finished, self._modules):
            with self._trace.spans.span(Kind.BACKWARD, "encoder window", module=module.name):
                module.finish(window)
        for window, module in product(encoded, self._modules):
            with self._trace.spans.span(Kind.FORWARD, "encoder window", module=module.name):
                module.encode(window)
                if window not in self._schedule.sent_later:
                    module.spread_features(window)

    def destroy(self) -> None:
        self.exchange.destroy()
