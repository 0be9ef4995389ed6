"""Once a step, both sides of each lane compare sample keys and token counts over the host.

An image can then never meet another sample's text, and a count that differs is one error that names the sample
instead of a hang in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from mimo.comm import HostChannel
from mimo.data.batch import Microbatch
from mimo.grid.groups import Grids
from mimo.grid.spec import GridSpec, Layout, lane_shares, lane_sources
from mimo.protocols import LANGUAGE

# For each microbatch, (key, token count) of each sample.
Manifest = list[list[tuple[str, int]]]
# For each microbatch and served lane, in lane order, the context-parallel rank of each row of an encoder's output, one
# byte each.
Owners = list[list[bytes]]


class Handshake:
    """Compares what the encoder side and the language side of each lane are about to train on.

    Args:
        grids: process groups; messages travel on `grids.host`.
        micro_batch_size: samples of one lane in one microbatch.

    Attributes:
        owners: for each encoder, those of the step, on its ranks that send over a bridge to context-parallel ranks;
            empty elsewhere.
    """

    def __init__(self, grids: Grids, micro_batch_size: int) -> None:
        self.grids = grids
        self.owners: dict[str, Owners] = {}
        self.micro_batch_size = micro_batch_size
        self._channel = HostChannel(grids.host, tag=0)

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The rank whose message, or readiness for one, is waited for now."""
        return self._channel.waits_for

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Exchange the manifests of a step. Every rank calls this, in step order.

        Raises:
            ValueError: on the language rank whose lane differs, naming both samples and counts.
        """
        self.flush()
        own: dict[tuple[str, int], Manifest] = {}
        for encoder in self.grids.layout.encoders:
            own |= self._offer(encoder, microbatches)
        for encoder in self.grids.layout.encoders:
            self._compare(encoder, microbatches, own)
        layout = self.grids.layout
        for encoder in layout.encoders if layout.kind == "disjoint" and layout.language.cp > 1 else ():
            self._tell_owners(encoder, microbatches)

    def _tell_owners(self, encoder: GridSpec, microbatches: Sequence[Microbatch]) -> None:
        """Tell the encoder's last stage, which has no text, which context-parallel rank needs each row."""
        layout, rank = self.grids.layout, self.grids.rank
        if rank in layout.language.ranks:
            position = layout.language.coordinates(rank)
            if position["tp"] or position["cp"] or position["pp"]:
                return
            for dp, share in lane_sources(encoder.dp, layout.num_lanes, self.micro_batch_size, position["dp"]):
                message = []
                for batch in microbatches:
                    assert batch.text is not None and batch.text.part is not None, "language ranks share rows"
                    ends = list(accumulate(batch.text.token_counts[encoder.name], initial=0))
                    owners = batch.text.part.owners[encoder.name]
                    message.append(owners[ends[share.start]:ends[share.stop]].numpy().tobytes())
                for tp in range(encoder.tp):
                    self._channel.send(encoder.rank_at(dp=dp, tp=tp, pp=-1), message)
        elif rank in encoder.ranks and encoder.coordinates(rank)["pp"] == encoder.pp - 1:
            shares = lane_shares(encoder.dp, layout.num_lanes, self.micro_batch_size,
                                 encoder.coordinates(rank)["dp"])
            by_lane = [self._channel.receive(layout.language.rank_at(dp=share.lane)) for share in shares]
            self.owners[encoder.name] = [list(each) for each in zip(*by_lane, strict=True)]

    def flush(self) -> None:
        """Wait until the other sides have taken what this rank has sent."""
        self._channel.flush()

    def _offer(self, encoder: GridSpec, microbatches: Sequence[Microbatch]) -> dict[tuple[str, int], Manifest]:
        """Send each lane its manifest, and return those whose receiver is this rank."""
        if self.grids.rank not in encoder.ranks:
            return {}
        position = encoder.coordinates(self.grids.rank)
        if position["tp"] or position["cp"] or position["pp"] != encoder.pp - 1:
            return {}
        layout, own = self.grids.layout, {}
        shares = lane_shares(encoder.dp, layout.num_lanes, self.micro_batch_size, position["dp"])
        for index, share in enumerate(shares):
            manifest: Manifest = []
            for batch in microbatches:
                side = batch.encoders[encoder.name]
                ends = list(accumulate(side.lane_sizes, initial=0))
                samples = slice(ends[index], ends[index + 1])
                manifest.append(list(zip(side.keys[samples], side.token_counts[samples], strict=True)))
            receiver = layout.language.rank_at(dp=share.lane)
            if receiver == self.grids.rank:
                own[encoder.name, share.lane] = manifest
            else:
                self._channel.send(receiver, manifest)
        return own

    def _compare(self, encoder: GridSpec, microbatches: Sequence[Microbatch],
                 own: dict[tuple[str, int], Manifest]) -> None:
        layout = self.grids.layout
        if LANGUAGE not in self.grids.modules:
            return
        position = layout.language.coordinates(self.grids.rank)
        if position["tp"] or position["cp"] or position["pp"]:
            return
        lane = position["dp"]
        for dp, share in lane_sources(encoder.dp, layout.num_lanes, self.micro_batch_size, lane):
            sender = encoder.rank_at(dp=dp, pp=-1)
            theirs = own[encoder.name, lane] if sender == self.grids.rank else self._channel.receive(sender)
            for index, batch in enumerate(microbatches):
                assert batch.text is not None, "language ranks hold text"
                counts = batch.text.token_counts[encoder.name]
                ours = list(zip(batch.text.keys, counts, strict=True))[share.start : share.stop]
                require_same_samples(ours, theirs[index], encoder.name, sender, lane, index)


def require_same_samples(ours: Sequence[tuple[str, int]], theirs: Sequence[tuple[str, int]], module: str, sender: int,
                         lane: int, microbatch: int) -> None:
    """Compare the key and the image tokens of each sample of a lane's microbatch.

    Args:
        ours: those that the language side reads.
        theirs: those that the encoder side reads.
        module: the encoder.
        sender: its rank that sent them.
        lane: lane of the samples.
        microbatch: index in the iteration.

    Raises:
        ValueError: they differ. The message names the first such sample, and both keys or both counts.
    """
    place = f"lane {lane}, microbatch {microbatch}"
    for (key, count), (their_key, their_count) in zip(ours, theirs, strict=True):
        if key != their_key:
            raise ValueError(f"{place}: the language side reads sample {key!r}, but {module} rank {sender} encodes "
                             f"sample {their_key!r}")
        if count != their_count:
            raise ValueError(f"sample {key!r} ({place}): its text has {count} image tokens, but {module} rank {sender} "
                             f"makes {their_count} of its images")


# The functions below say how many rows of encoder output move where, for every microbatch of a step. Megatron Core
# sends shapes over the device before each payload, which makes the host wait for the GPU at every transfer. Here both
# sides of a lane know the token counts of their samples, which `Handshake` has compared, so no shape has to be sent.

# rows[microbatch][peer]: rows of encoder output, in the order in which peers are concatenated.
Rows = list[list[int]]


def order_by_owner(owners: Sequence[bytes], cp: int) -> tuple[list[int], np.ndarray]:
    """Sort the rows of one microbatch's encoder output such that those of each context-parallel rank lie together.

    Args:
        owners: for each served lane, the rank of each of its rows.
        cp: context-parallel ranks of a lane.

    Returns:
        The rows of each rank, lane by lane; and which row comes where, int64 `[rows]`.
    """
    counts, order, first = [], [np.zeros(0, np.int64)], 0
    for lane in owners:
        ranks = np.frombuffer(lane, np.uint8)
        counts += np.bincount(ranks, minlength=cp).tolist()
        order.append(first + np.argsort(ranks, kind="stable"))
        first += len(ranks)
    return counts, np.concatenate(order)


def source_rows(module: str, microbatches: Sequence[Microbatch]) -> Rows:
    """Count the rows of each microbatch's encoder output that belong to each served lane, in lane order."""
    rows = []
    for batch in microbatches:
        side = batch.encoders[module]
        ends = list(accumulate(side.lane_sizes, initial=0))
        rows.append([sum(side.token_counts[start:stop]) for start, stop in zip(ends, ends[1:], strict=False)])
    return rows


def destination_rows(module: str, layout: Layout, rank: int, microbatches: Sequence[Microbatch]) -> Rows:
    """Count the rows of each microbatch that each encoder data-parallel rank feeds to the lane of language rank `rank`.

    They are in sample order. On a context-parallel rank these are only the rows of its own tokens.
    """
    lane, encoder = layout.language.coordinates(rank)["dp"], layout.grids[module]
    rows = []
    for batch in microbatches:
        text = batch.text
        assert text is not None, "language ranks hold text"
        ends = np.cumsum([0, *text.token_counts[module]])
        if text.part is not None:
            # Rows before each sample's end that are among those of this rank.
            ends = np.searchsorted(text.part.rows[module].numpy(), ends)
        sources = lane_sources(encoder.dp, layout.num_lanes, len(text.keys), lane)
        rows.append([int(ends[share.stop] - ends[share.start]) for _, share in sources])
    return rows
