"""From flags to a rank's data: the source that gives it samples, and the loader that makes tensors of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mimo.config.data import DataConfig
from mimo.data_request import data_request
from mimo.grid.channel import HostChannel
from mimo.grid.reading import lanes_read_by, needs_of
from mimo.grid.spec import Layout
from mimo.protocols import DataProvider, DataRequest, ModelProvider, RoutedDataProvider
from mimo.training.loader import StepLoader
from mimo.training.sources import ReaderSource, RoutedSource, Source, StreamSource


def open_source(layout: Layout, rank: int, data_provider: DataProvider | RoutedDataProvider, data_config: Any,
                request: DataRequest, *, lane_loader: str = DataConfig.lane_loader, num_microbatches: int,
                host: dist.ProcessGroup | None = None, tag: int = 0) -> Source:
    """Open the data of one rank. Collective over the world where lanes are routed.

    Args:
        layout: all grids; must be valid.
        rank: this process.
        data_provider: the data set.
        data_config: its flags.
        request: what the run asks of it.
        lane_loader: `routed` or `per-lane`, for a data set that costs something to read.
        num_microbatches: microbatches of an iteration.
        host: gloo group of the whole world, needed where lanes are routed over several ranks.
        tag: tells this source's messages from those of others that are open on the group.

    Raises:
        ValueError: the data set refuses the configuration.
    """
    sizes = {"micro_batch_size": request.micro_batch_size, "num_microbatches": num_microbatches}
    needs = needs_of(layout, rank, request.micro_batch_size)
    if not isinstance(data_provider, RoutedDataProvider):
        return StreamSource(data_provider, data_config, request.tokens, needs, lanes=request.num_lanes,
                            seed=request.seed, split=request.split, **sizes)
    if lane_loader == "per-lane" or layout.world_size == 1:
        lanes = tuple(sorted({need.share.lane for need in needs}))
        return ReaderSource(data_provider.reader(data_config, request, lanes), lanes, needs, **sizes)
    assert host is not None, "routed lanes need the host group"
    own = lanes_read_by(layout, rank)
    local = ReaderSource(data_provider.reader(data_config, request, own), own, (), **sizes) if own else None
    return RoutedSource(local, layout, rank, request.micro_batch_size, HostChannel(host, tag))


def open_loader(layout: Layout, rank: int, *, model_provider: ModelProvider, model_config: Any,
                data_provider: DataProvider | RoutedDataProvider, data_config: Any, micro_batch_size: int,
                num_microbatches: int, seq_length: int, seed: int, split: str = "train",
                lane_loader: str = DataConfig.lane_loader, host: dist.ProcessGroup | None = None, tag: int = 0,
                **loader: Any) -> StepLoader:
    """The data of one rank as microbatches. Collective over the world where lanes are routed.

    Args:
        layout: all grids; must be valid.
        rank: this process.
        model_provider: the model family.
        model_config: its flags.
        data_provider: the data set.
        data_config: its flags.
        micro_batch_size: samples of a lane in a microbatch.
        num_microbatches: microbatches of an iteration.
        seq_length: tokens per sample after image expansion and padding.
        seed: seed of the sample order.
        split: `train` or `valid`.
        lane_loader: as `open_source`.
        host: as `open_source`.
        tag: as `open_source`.
        loader: more arguments of `StepLoader`.

    Raises:
        ValueError: the data set refuses the configuration.
    """
    request = data_request(layout, model_provider, model_config, micro_batch_size=micro_batch_size,
                           seq_length=seq_length, seed=seed, split=split)
    source = open_source(layout, rank, data_provider, data_config, request, lane_loader=lane_loader,
                         num_microbatches=num_microbatches, host=host, tag=tag)
    return StepLoader(layout, rank, source, model_provider=model_provider, model_config=model_config,
                      micro_batch_size=micro_batch_size, num_microbatches=num_microbatches, seq_length=seq_length,
                      **loader)
