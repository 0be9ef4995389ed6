"""Where a run starts: at a checkpoint, at pretrained weights, or at random ones."""

from __future__ import annotations

from typing import Any, Protocol

from mimo.checkpoint.agree import raise_together
from mimo.checkpoint.differences import data_fields
from mimo.checkpoint.load import Loaded, find_checkpoint, load_checkpoint
from mimo.checkpoint.single_model import load_single_model
from mimo.checkpoint.state import Progress, RunState, Source
from mimo.observe.watchdog import Watchdog
from mimo.protocols import MegatronSourceProvider, ModelProvider
from mimo.training.loader import StepLoader
from mimo.training.step import TrainerParts


class Resumable(Protocol):
    """What reads the data of a run, and can go to where it was."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place; `state` as in `mimo.checkpoint.state.RunState.streams`. Raises ValueError if it cannot."""
        ...


def run_state(parts: TrainerParts, loader: StepLoader) -> RunState:
    """What the checkpoints of this run hold."""
    return RunState(parts.config, parts.grids, parts.platform, parts.built, parts.optimizer, parts.scheduler,
                    loader.state_dict())


def start(
    state: RunState, provider: ModelProvider, loader: Resumable | None, watchdog: Watchdog
) -> tuple[Progress, list[str]]:
    """Bring model, optimizers, schedule, generators and data to where the run begins. Collective over the world.

    A checkpoint found under --load wins over pretrained weights, and one of the run itself under --save over --load: a
    job that was started from them and is started again goes on from its own checkpoint.

    Args:
        state: what the checkpoints of the run hold; its `source` is set.
        provider: the model family.
        loader: the data; None for a run that takes only weights from a checkpoint.
        watchdog: told about every wait.

    Returns:
        How far the run is, and lines that tell a person what was loaded.

    Raises:
        ValueError: what is asked for cannot be loaded; see `mimo.checkpoint.load`, `mimo.checkpoint.single_model` and
            `mimo.weights.load`.
    """
    flags, family = state.config.checkpoint, state.config.model_family
    if loader is not None:
        _read_data_fields(state)
    source = provider.megatron_source(family) if isinstance(provider, MegatronSourceProvider) else None
    state.source = found = find_checkpoint(state)
    if found is not None:
        loaded = load_checkpoint(state, found.folder, watchdog, found.flag)
        _continue_data(state, loader, loaded, found)
        lines = [f"loaded {found.folder}" + ("" if loaded.streams else " (weights only)")]
        if found.flag == "--save":
            lines.append(f"  --load {flags.load}{' --finetune' if flags.finetune else ''} is not read: --save has the "
                         "run's own checkpoint")
        if flags.has_pretrained:
            lines.append("  pretrained Hugging Face weights are not read: the checkpoint has the run's own")
        if source is not None:
            lines.append(f"  {source.flag} {source.path} is not read: the checkpoint has the run's own weights")
        return loaded.progress, lines + [f"  {note}" for note in loaded.notes]
    if flags.has_pretrained:
        from mimo.weights.load import HfPaths, load_hf

        with watchdog.on_files("pretrained weights"):
            report = load_hf(state.built, state.grids, provider, family,
                             HfPaths(flags.load_hf, flags.load_vision_from, flags.load_language_from),
                             flags.allowed_differences)
            state.optimizer.reload_model_params()
        given = (flags.load_hf, flags.load_vision_from, flags.load_language_from)
        return Progress(), [f"weights from {', '.join(path for path in given if path)}",
                            *(f"  {note}" for note in report.notes)]
    if source is not None:
        return Progress(), load_single_model(state, source, provider.token_spec(family).vocab_size, watchdog)
    lines = [] if flags.load is None else [f"--load {flags.load} holds no checkpoint yet: the run starts fresh"]
    return Progress(), lines


def _read_data_fields(state: RunState) -> None:
    """Set what the run's checkpoints say about its data, before the first sample: files that flags name may change
    while the run goes on. The first rank reads them, which writes the checkpoints' common state."""
    error = None
    if state.grids.rank == 0:
        try:
            state.data = data_fields(state.config)
        except (ValueError, OSError) as problem:
            error = f"--dataset-provider {state.config.data.dataset_provider}: {problem}"
    raise_together(state.grids, error)


def _continue_data(state: RunState, loader: Resumable | None, loaded: Loaded, source: Source) -> None:
    """Bring the data to where the checkpoint was made, or stop every rank for the reason that one of them has."""
    error = None
    if loaded.streams is not None:
        assert loader is not None, "a run without a loader takes only weights (--finetune)"
        try:
            loader.load_state_dict(loaded.streams)
        except ValueError as problem:
            error = f"{source.flag} {source.folder}: {problem}"
    raise_together(state.grids, error)
