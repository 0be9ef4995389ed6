"""Builds everything a rank needs to train from a validated configuration, and loads what the run starts from."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.utils import get_model_config, unwrap_model

from mimo.bridge.colocated import Exchange
from mimo.bridge.disjoint import Bridge
from mimo.bridge.handshake import Handshake
from mimo.bridge.pipeline import PipelineCommunicator, StageShapes
from mimo.checkpoint.differences import data_fields
from mimo.checkpoint.load import find_checkpoint, load_checkpoint
from mimo.checkpoint.state import Progress, RunState
from mimo.comm import raise_on_any_rank
from mimo.config.trainer import RunConfig
from mimo.data.loader import StepLoader
from mimo.grid.dry_run import bridge_width, num_levels
from mimo.grid.groups import Grids
from mimo.grid.windows import BACKWARD_COST
from mimo.model.build import BuiltModel, build_model, layer_impl, params_dtype
from mimo.model.deepstack import stage_levels
from mimo.model.submodule import VisionSubmodule
from mimo.observability.clock import DeviceClock, HostClock
from mimo.observability.spans import ScheduleSpans, Spans, Trace
from mimo.observability.startup import STARTUP, Phase
from mimo.platform.base import Platform
from mimo.protocols import LANGUAGE, MegatronSourceProvider, ModelProvider
from mimo.training.encoder_activations import ActivationBudget, LayerRecomputation
from mimo.training.encoder_prefetch import EncoderPrefetch
from mimo.training.encoder_windows import EncoderWindows, ModuleWindows
from mimo.training.fp8_weights import Fp8Weights
from mimo.training.grad_sync import GradSync
from mimo.training.optimizer import build_optimizer, build_scheduler
from mimo.training.step import TrainerParts
from mimo.watchdog import flight_recorder
from mimo.watchdog.watchdog import Watchdog
from mimo.weights.import_megatron import load_single_model


def setup_trainer(config: RunConfig, provider: ModelProvider, grids: Grids, platform: Platform,
                  watchdog: Watchdog) -> TrainerParts:
    """Build everything a step works on. Collective over the world, in one order on every rank."""
    STARTUP.enter(Phase.MODEL)
    watchdog.on_stall.append(partial(flight_recorder.dump, Path(config.observe.run_dir) / "flight-recorder", grids.rank,
                                     platform.backend))
    clock = None
    if config.observe.timeline:
        clock = DeviceClock() if platform.name == "cuda" else HostClock()
    spans = Spans(clock, {name: grids.layout.grids[name].coordinates(grids.rank)["pp"] for name in grids.modules})
    if config.observe.nvtx:
        spans.listen(torch.cuda.nvtx.range)  # Nsight Systems shows them
    schedule_spans = ScheduleSpans(spans)
    built = build_model(config, provider, grids, platform, watchdog, spans)
    STARTUP.enter(Phase.GROUPS)
    watchdog.groups = partial(flight_recorder.group_statuses, platform.backend)
    watchdog.schedule, watchdog.on_device = schedule_spans.status, platform.name == "cuda"
    communicator = _communicator(config, provider, grids, platform, watchdog, built, schedule_spans)
    windows = _windows(config, provider, grids, platform, built, Trace(watchdog, spans))
    if windows is not None and communicator is not None:
        communicator.after_backward, communicator.before_backward = windows.after_backward, windows.before_backward
    STARTUP.enter(Phase.OPTIMIZERS)
    grad_sync = GradSync(built, grids, Trace(watchdog, spans))
    optimizer = build_optimizer(config.optim, built, grids)
    optimizer.spans = spans
    fp8_weights = None
    if config.model.fp8_primary_weights:
        fp8_weights = Fp8Weights(built, optimizer, config, layer_impl(config, platform))
    # Megatron Core's schedule takes its callbacks from the model's configuration.
    model_config = get_model_config(built.model)
    # With encoder windows the encoders' last backward passes come after the schedule, and the reduction after them.
    model_config.finalize_model_grads_func = grad_sync.finalize if windows is None else None
    model_config.no_sync_func = built.model.no_sync
    model_config.timers = schedule_spans
    if config.ddp.overlap_grad_reduce:
        model_config.grad_sync_func = grad_sync.start
    # Waiting on a transfer keeps the order of streams; the extra synchronisation only works around old NCCL bugs.
    model_config.batch_p2p_sync = False
    return TrainerParts(config, grids, platform, watchdog, built, communicator,
                        Handshake(grids, config.lane_rows), grad_sync, optimizer,
                        build_scheduler(config, optimizer), schedule_spans,
                        _prefetch(config, grids, platform, watchdog, built, communicator, spans), windows,
                        fp8_weights)


def _communicator(config: RunConfig, provider: ModelProvider, grids: Grids, platform: Platform, watchdog: Watchdog,
                  built: BuiltModel, schedule_spans: ScheduleSpans) -> PipelineCommunicator | None:
    if not grids.bridged and grids.layout.language.pp == 1:
        return None
    family = config.model_family
    frozen, ahead = config.model.frozen, config.layout.encoder_run_ahead
    windows = grids.layout.encoder_window is not None
    if (ahead or windows) and platform.name == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        # With one queue for all streams, a pass waits behind a message that waits for the other side.
        what = f"--encoder-run-ahead {ahead}" if ahead else f"--encoder-window with --llm-pp {grids.layout.language.pp}"
        raise ValueError(f"{what} needs several streams at a time, and CUDA_DEVICE_MAX_CONNECTIONS=1 allows one: leave "
                         "the variable unset or set it to 32, or choose another layout")
    bridges = [
        Bridge(grids, encoder.name, micro_batch_size=config.lane_rows,
               hidden_size=bridge_width(provider, family, encoder.name), dtype=params_dtype(config),
               needs_grad=not {encoder.name, "projector"} <= frozen, run_ahead=ahead, device=platform.device,
               backend=platform.backend, watchdog=watchdog, spans=schedule_spans.spans)
        for encoder in (grids.layout.encoders if grids.bridged else ())
    ]
    model_config = get_model_config(built.model)
    # Ranks without the language model have its configuration only for its sizes, and without this dtype.
    model_config.pipeline_dtype = params_dtype(config)
    # Columns of the hidden states before and after this rank's stage of the language model. With DeepStack, they also
    # have the features that later layers add.
    language, hidden = grids.layout.language, provider.hidden_size(family)
    split = language.cp * (language.tp if config.layout.sequence_parallel else 1)
    before = after = hidden
    levels = max((num_levels(provider, family, encoder.name) for encoder in grids.layout.encoders), default=0)
    if levels and LANGUAGE in grids.modules:
        stage, decoder = language.coordinates(grids.rank)["pp"], get_model_config(built.model.language_model)
        before, after = (hidden * (1 + stage_levels(decoder, levels, stage + more)) for more in (0, 1))
    return PipelineCommunicator(grids, model_config, bridges, StageShapes(split, before, after), schedule_spans)


def _windows(config: RunConfig, provider: ModelProvider, grids: Grids, platform: Platform, built: BuiltModel,
             trace: Trace) -> EncoderWindows | None:
    """Build the windows in which this rank's encoders run; None if each microbatch is encoded by itself."""
    if grids.layout.encoder_window is None:
        return None
    exchange = Exchange(grids, device=platform.device, backend=platform.backend, trace=trace)
    gib, modules = config.layout.encoder_activation_gib, []
    budget = None if gib is None else ActivationBudget(int(gib * 2**30))
    for encoder in grids.layout.encoders:
        submodule = unwrap_model(built.model.modality_submodules[encoder.name])
        # A frozen encoder keeps nothing, whether its projector trains or not.
        modules.append(ModuleWindows(
            encoder, built.model.modality_submodules[encoder.name], grids, exchange,
            hidden_size=bridge_width(provider, config.model_family, encoder.name),
            encoder_hidden_size=submodule.config.hidden_size, dtype=built.params_dtype,
            device=platform.device, needs_grad=built.trainable[encoder.name], chunk=config.layout.encoder_chunk,
            balanced=config.layout.encoder_balance,
            backward=0.0 if encoder.name in config.model.frozen else BACKWARD_COST,
            recomputation=(None if budget is None or encoder.name in config.model.frozen
                           else LayerRecomputation(encoder.name, submodule, budget))))
    built.model.windows = EncoderWindows(grids, modules, exchange, grids.layout.encoder_window, trace)
    return built.model.windows


def _prefetch(config: RunConfig, grids: Grids, platform: Platform, watchdog: Watchdog, built: BuiltModel,
              communicator: PipelineCommunicator | None, spans: Spans) -> EncoderPrefetch | None:
    """Build the prefetch queue of this rank's encoder, if it has one, and connect it to the model and its bridges."""
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
        trace=Trace(watchdog, spans))
    built.model.prefetch = prefetch
    for bridge in communicator.bridges:
        if bridge.module == name:
            bridge.while_waiting = prefetch.launch
    return prefetch


@contextmanager
def kept_objects() -> Iterator[None]:
    """Context in which Python's garbage collector skips the objects that exist at its start.

    Modules, models and plans are about half a million objects. A full collection visits them all, which takes some
    tenths of a second. Each rank does this at another time, and all others wait for it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Resumable(Protocol):
    """Reader of a run's data that can return to an earlier position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position in `state` (see `mimo.checkpoint.state.RunState.streams`), or raise ValueError."""
        ...


def run_state(parts: TrainerParts, loader: StepLoader) -> RunState:
    """Return the state that this run's checkpoints hold."""
    return RunState(parts.config, parts.grids, parts.platform, parts.built, parts.optimizer, parts.scheduler,
                    loader.state_dict())


def start(
    state: RunState, provider: ModelProvider, loader: Resumable | None, watchdog: Watchdog
) -> tuple[Progress, list[str]]:
    """Bring model, optimizers, schedule, generators and data to where the run begins. Collective over the world.

    A checkpoint under --load is preferred to pretrained weights, and the run's own checkpoint under --save to both.
    Therefore a job that is started a second time with the same flags continues from its own checkpoint. A run that
    takes only weights from a checkpoint has no loader.

    Returns:
        The run's progress, and lines for the log that say what was loaded.

    Raises:
        ValueError: what is asked for cannot be loaded; see `mimo.checkpoint.load`, `mimo.weights.import_megatron` and
            `mimo.weights.load`.
    """
    flags, family = state.config.checkpoint, state.config.model_family
    if loader is not None:
        # What checkpoints say about the data is read before the first sample, because files that flags name may change
        # during the run. Only the first rank reads it, since it writes the common state of checkpoints.
        error = None
        if state.grids.rank == 0:
            try:
                state.data = data_fields(state.config)
            except (ValueError, OSError) as problem:
                error = f"--dataset-provider {state.config.data.dataset_provider}: {problem}"
        raise_on_any_rank(state.grids, error)
    source = provider.megatron_source(family) if isinstance(provider, MegatronSourceProvider) else None
    state.source = found = find_checkpoint(state)
    if found is not None:
        loaded = load_checkpoint(state, found.folder, watchdog, found.flag)
        # If one rank's data cannot go to the checkpoint's position, all ranks stop with its reason.
        error = None
        if loaded.streams is not None:
            assert loader is not None, "a run without a loader takes only weights (--finetune)"
            try:
                loader.load_state_dict(loaded.streams)
            except ValueError as problem:
                error = f"{found.flag} {found.folder}: {problem}"
        raise_on_any_rank(state.grids, error)
        lines = [f"loaded {found.folder}" + (" (weights only)" if loaded.weights_only else "")]
        if found.flag == "--save":
            lines.append(f"  --load {flags.load}{' --finetune' if flags.finetune else ''} is not read: --save has the "
                         "run's own checkpoint")
        if flags.has_pretrained:
            lines.append("  pretrained Hugging Face weights are not read: the checkpoint has the run's own")
        if source is not None:
            lines.append(f"  {source.flag} {source.path} is not read: the checkpoint has the run's own weights")
        return loaded.progress, lines + [f"  {note}" for note in loaded.notes]
    if flags.has_pretrained:
        from mimo.weights.load import HfPaths, download_weights, load_hf

        hf_paths = HfPaths(flags.load_hf, flags.load_vision_from, flags.load_language_from)
        download_weights(state.grids, hf_paths, watchdog)
        with watchdog.on_files("pretrained weights"):
            report = load_hf(state.built, state.grids, provider, family, hf_paths, flags.allowed_differences)
            state.optimizer.reload_model_params()
        given = (flags.load_hf, flags.load_vision_from, flags.load_language_from)
        return Progress(), [f"weights from {', '.join(path for path in given if path)}",
                            *(f"  {note}" for note in report.notes)]
    if source is not None:
        return Progress(), load_single_model(state, source, provider.token_spec(family).vocab_size, watchdog)
    lines = [] if flags.load is None else [f"--load {flags.load} holds no checkpoint yet: the run starts fresh"]
    return Progress(), lines
