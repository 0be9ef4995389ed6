"""Grids and layouts of any world size as plain data, without torch.

Rank order inside a grid is Megatron's `tp-cp-dp-pp` (the first varies fastest); the expert view of the same ranks is
`expt_tp-ep-expt_dp-pp`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mimo.protocols import LANGUAGE


@dataclass(frozen=True)
class GridSpec:
    """The ranks of one module and their factorisation.

    Attributes:
        name: module name, `language` or an encoder.
        offset: first global rank.
        tp, cp, dp, pp: tensor, context, data and pipeline parallel sizes.
        ep: expert parallel size. Experts are split over `ep * expt_tp` ranks of a pipeline stage.
        expt_tp: tensor parallel size inside an expert.
        stage_layers: layers of each pipeline stage; empty: as many on each.
    """

    name: str
    offset: int = 0
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    expt_tp: int = 1
    stage_layers: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expt_dp(self) -> int:
        """Data-parallel size of the experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expt_tp)

    @property
    def shares_experts(self) -> bool:
        """Whether data-parallel replicas share experts, so that they wait for each other in every layer."""
        return self.ep * self.expt_tp > self.tp * self.cp

    @property
    def ranks(self) -> range:
        """Global ranks of the grid."""
        return range(self.offset, self.offset + self.size)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a global rank: `tp`, `cp`, `dp`, `pp`. Raises ValueError outside the grid."""
        if rank not in self.ranks:
            raise ValueError(
                f"rank {rank} is not in grid {self.name!r} (ranks {self.ranks.start}-{self.ranks.stop - 1})"
            )
        local, position = rank - self.offset, {}
        for axis in ("tp", "cp", "dp", "pp"):
            size = getattr(self, axis)
            position[axis] = local % size
            local //= size
        return position

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the global rank at a position, as the inverse of `coordinates`. Negative `pp` counts from the end."""
        pp %= self.pp
        return self.offset + tp + self.tp * (cp + self.cp * (dp + self.dp * pp))


@dataclass(frozen=True)
class Layout:
    """All grids of a run.

    Attributes:
        kind: `disjoint` (grids tile the world), `colocated` (all grids span the same ranks) or `homogeneous` (encoders
            are on the ranks of the first language stage, split as it is).
        world_size: number of ranks.
        encoders: encoder grids in module order; empty for text-only runs.
        language: the language grid.
        encoder_window: microbatches whose images all encoder replicas encode together (colocated only); 0: those of the
            whole iteration; None: each replica encodes the images of its own lanes, microbatch by microbatch.
    """

    kind: str
    world_size: int
    encoders: tuple[GridSpec, ...]
    language: GridSpec
    encoder_window: int | None = None

    @property
    def grids(self) -> dict[str, GridSpec]:
        """Every grid by module name, encoders first."""
        return {**{grid.name: grid for grid in self.encoders}, LANGUAGE: self.language}

    @property
    def num_lanes(self) -> int:
        """Number of data lanes: the language data-parallel size."""
        return self.language.dp

    @property
    def encoder_spans_stages(self) -> bool:
        """Whether tensor-parallel ranks of an encoder are on different stages of the language model (colocated)."""
        stage = self.language.size // self.language.pp
        return any(stage % encoder.tp for encoder in self.encoders)

    def modules_of(self, rank: int) -> tuple[str, ...]:
        """Modules that a rank holds, encoders first."""
        return tuple(name for name, grid in self.grids.items() if rank in grid.ranks)

    def describe(self, rank: int) -> str:
        """Describe a rank for messages: `rank 3 (language grid, tp 1 cp 0 dp 0 pp 0, lane 0)`."""
        modules = []
        for name in self.modules_of(rank):
            grid = self.grids[name]
            position = grid.coordinates(rank)
            axes = " ".join(f"{axis} {index}" for axis, index in position.items())
            size, dp_rank, lanes = grid.dp, position["dp"], self.num_lanes
            first, last = dp_rank * lanes // size, ((dp_rank + 1) * lanes - 1) // size
            served = f"lane {first}" if first == last else f"lanes {first}-{last}"
            if self.encoder_window is not None and name != LANGUAGE:
                served = "images of all lanes"
            modules.append(f"{name} grid, {axes}, {served}")
        return f"rank {rank} ({'; '.join(modules)})"


@dataclass(frozen=True)
class LaneShare:
    """The part of one lane's microbatch that one encoder data-parallel rank serves.

    Attributes:
        lane: lane number.
        start, stop: range of samples of the lane's microbatch, `0 <= start <= stop <= micro_batch_size`.
    """

    lane: int
    start: int
    stop: int


def lane_shares(encoder_dp: int, language_dp: int, micro_batch_size: int, dp_rank: int) -> tuple[LaneShare, ...]:
    """Return the shares of each microbatch that encoder data-parallel rank `dp_rank` encodes, in lane order.

    Fan-out (`encoder_dp <= language_dp`): whole microbatches of `language_dp / encoder_dp` consecutive lanes.
    Fan-in: one lane is shared by `encoder_dp / language_dp` ranks, its samples cut into consecutive runs whose
    lengths differ by at most one.
    """
    if encoder_dp <= language_dp:
        per_rank = language_dp // encoder_dp
        first = dp_rank * per_rank
        return tuple(LaneShare(lane, 0, micro_batch_size) for lane in range(first, first + per_rank))
    per_lane = encoder_dp // language_dp
    lane, part = divmod(dp_rank, per_lane)
    start = part * micro_batch_size // per_lane
    stop = (part + 1) * micro_batch_size // per_lane
    return (LaneShare(lane, start, stop),)


def lane_sources(
    encoder_dp: int, language_dp: int, micro_batch_size: int, lane: int
) -> tuple[tuple[int, LaneShare], ...]:
    """Return the encoder data-parallel ranks that feed a lane, with the part that each feeds, in sample order."""
    found = [(dp, share) for dp in range(encoder_dp)
             for share in lane_shares(encoder_dp, language_dp, micro_batch_size, dp) if share.lane == lane]
    return tuple(sorted(found, key=lambda item: item[1].start))
