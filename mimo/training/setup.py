"""From a validated configuration to a rank that can train: groups, model, bridges, optimizers, schedule."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron.core.utils import get_model_config, unwrap_model

from mimo.bridge.disjoint import Bridge
from mimo.bridge.handshake import Handshake
from mimo.bridge.pipeline import PipelineCommunicator
from mimo.config.run import RunConfig
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel, build_model, layer_impl, params_dtype
from mimo.model.submodule import VisionSubmodule
from mimo.observe import flight_recorder
from mimo.observe.clock import DeviceClock, HostClock
from mimo.observe.profiler import nvtx_range
from mimo.observe.schedule_spans import ScheduleSpans
from mimo.observe.spans import Spans
from mimo.observe.startup import STARTUP, Phase
from mimo.observe.watchdog import Watchdog
from mimo.optim.build import build_optimizer
from mimo.optim.schedule import build_scheduler
from mimo.platform.base import Platform
from mimo.protocols import LANGUAGE, ModelProvider
from mimo.training.encoder_prefetch import EncoderPrefetch
from mimo.training.grad_sync import GradSync
from mimo.training.step import TrainerParts


def setup_trainer(config: RunConfig, provider: ModelProvider, grids: Grids, platform: Platform,
                  watchdog: Watchdog) -> TrainerParts:
    """Build everything a step works on. Collective over the world, in one order on every rank.

    Args:
        config: validated flags.
        provider: the model family.
        grids: process groups of the layout.
        platform: device and backend.
        watchdog: told about every wait.
    """
    STARTUP.enter(Phase.MODEL)
    watchdog.at_stall.append(partial(flight_recorder.dump, Path(config.observe.run_dir) / "flight-recorder", grids.rank,
                                     platform.backend))
    spans = _spans(config, grids, platform)
    schedule_spans = ScheduleSpans(spans)
    built = build_model(config, provider, grids, platform, watchdog, spans)
    STARTUP.enter(Phase.GROUPS)
    watchdog.groups = partial(flight_recorder.group_statuses, platform.backend)
    watchdog.schedule, watchdog.on_device = schedule_spans.status, platform.name == "cuda"
    communicator = _communicator(config, provider, grids, platform, watchdog, built, schedule_spans)
    STARTUP.enter(Phase.OPTIMIZERS)
    grad_sync = GradSync(built, grids, watchdog, spans)
    optimizer = build_optimizer(config.optim, built, grids)
    optimizer.spans = spans
    _wire_schedule(config, built, grad_sync, schedule_spans)
    return TrainerParts(config, grids, platform, watchdog, built, communicator,
                        Handshake(grids, config.lane_rows), grad_sync, optimizer,
                        build_scheduler(config, optimizer), schedule_spans,
                        _prefetch(config, grids, platform, watchdog, built, communicator, spans))


def _spans(config: RunConfig, grids: Grids, platform: Platform) -> Spans:
    clock = None
    if config.observe.timeline:
        clock = DeviceClock() if platform.name == "cuda" else HostClock()
    spans = Spans(clock, {name: grids.layout.grids[name].coordinates(grids.rank)["pp"] for name in grids.modules})
    if config.observe.nvtx:
        spans.listen(nvtx_range)
    return spans


def _communicator(config: RunConfig, provider: ModelProvider, grids: Grids, platform: Platform, watchdog: Watchdog,
                  built: BuiltModel, schedule_spans: ScheduleSpans) -> PipelineCommunicator | None:
    if grids.colocated:
        return None
    hidden = provider.hidden_size(config.model_family)
    frozen = config.model.frozen
    bridges = [
        Bridge(grids, encoder.name, micro_batch_size=config.lane_rows, hidden_size=hidden,
               dtype=params_dtype(config), needs_grad=not {encoder.name, "projector"} <= frozen, device=platform.device,
               backend=platform.backend, watchdog=watchdog, spans=schedule_spans.spans)
        for encoder in grids.layout.encoders
    ]
    language = grids.layout.language
    split = language.cp * (language.tp if config.layout.sequence_parallel else 1)
    shape = (config.train.seq_length // split, config.train.micro_batch_size, hidden)
    model_config = get_model_config(built.model)
    # Ranks without the language model hold its configuration for its sizes alone.
    model_config.pipeline_dtype = params_dtype(config)
    return PipelineCommunicator(grids, model_config, bridges, shape, schedule_spans)


def _prefetch(config: RunConfig, grids: Grids, platform: Platform, watchdog: Watchdog, built: BuiltModel,
              communicator: PipelineCommunicator | None, spans: Spans) -> EncoderPrefetch | None:
    """The queue of this rank's encoder, where there is one, and who asks it and gives it time."""
    if not config.train.encoder_prefetch_depth or communicator is None or LANGUAGE in grids.modules:
        return None
    (name,) = grids.modules
    submodule = unwrap_model(built.model.modality_submodules[name])
    if not isinstance(submodule, VisionSubmodule):
        raise ValueError(f"--encoder-prefetch-depth {config.train.encoder_prefetch_depth}: {name} is a "
                         f"{type(submodule).__name__}, whose encoder cannot run apart from its projector; leave it out")
    prefetch = EncoderPrefetch(
        name, submodule, depth=config.train.encoder_prefetch_depth, device=platform.device,
        own_stream=platform.name == "cuda" and layer_impl(config, platform) != "transformer_engine",
        watchdog=watchdog, spans=spans)
    built.model.prefetch = prefetch
    for bridge in communicator.bridges:
        if bridge.module == name:
            bridge.while_waiting = prefetch.launch
    return prefetch


def _wire_schedule(config: RunConfig, built: BuiltModel, grad_sync: GradSync, schedule_spans: ScheduleSpans) -> None:
    """Give the wheel's schedule what it reads from the model's config."""
    model_config = get_model_config(built.model)
    model_config.finalize_model_grads_func = grad_sync.finalize
    model_config.no_sync_func = built.model.no_sync
    model_config.timers = schedule_spans
    if config.ddp.overlap_grad_reduce:
        model_config.grad_sync_func = built.model.start_grad_sync
    # A transfer's stream order is kept by waiting on it; the extra device synchronisation works around old NCCL bugs.
    model_config.batch_p2p_sync = False
