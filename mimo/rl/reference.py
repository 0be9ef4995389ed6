"""The reference policy: weights that stay as they are, on the host, and take the policy's place for a forward pass.

The run's own model is used for both, so the reference has its layout, and one rank keeps its own shards alone. What is
exchanged are bytes of storages, as in `mimo.rl.offload`: parameters, buffers and Megatron Core's contiguous buffers
behind them stay the objects that optimizers and hooks refer to, and the policy comes back bit by bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mimo.checkpoint import paths
from mimo.checkpoint.load import load_weights
from mimo.checkpoint.state import RunState
from mimo.comm.host import broadcast_object, raise_on_any_rank
from mimo.config.rl import RlConfig
from mimo.model.build import WEIGHTS, BuiltModel
from mimo.protocols import LANGUAGE, MegatronSourceProvider, ModelProvider
from mimo.rl.offload import Held, HostMemory, synchronize, weight_storages
from mimo.watchdog.watchdog import Watchdog
from mimo.weights.import_megatron import load_single_weights
from mimo.weights.load import HfPaths, load_hf

logger = logging.getLogger(__name__)


class ReferencePolicy:
    """A copy of all weights and buffers of this rank, as they are when it is made. Collective over each module's ranks.

    It takes as much host memory as they take on the device, pinned on CUDA; while they are exchanged, a block of
    `mimo.rl.offload` more on the device. Nothing else is kept: during a forward pass the policy's weights are
    what lies on the host.

    Args:
        built: this rank's model, its weights not offloaded.
        device: where it is.
    """

    def __init__(self, built: BuiltModel, device: torch.device) -> None:
        self._built, self._device = built, device
        self._memory = HostMemory(pinned=device.type == "cuda")
        with self._complete():
            held = self._held()
            self._sizes = [each.num_bytes for each in held]
            self._memory.save(held)
            synchronize(device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(self._sizes)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While the block runs, the model has the weights of the reference. Collective over each module's ranks.

        Only forward passes without gradient may run in it; no step, refit or checkpoint.

        Raises:
            OffloadedError: the weights are not on the device.
        """
        with self._complete():
            self._exchange()
            try:
                yield
            finally:
                self._exchange()

    def exchange(self) -> None:
        """Make the model's weights the reference, and what was the reference the model's. Collective as `in_place`."""
        with self._complete():
            self._exchange()

    @contextmanager
    def _complete(self) -> Iterator[None]:
        """Gathers of parameters that an overlapped step left open are finished, and none begins in the block."""
        self._built.residency.require("the reference policy", WEIGHTS)
        self._built.model.disable_forward_pre_hook()
        try:
            yield
        finally:
            self._built.model.enable_forward_pre_hook()

    def _held(self) -> list[Held]:
        """Looked up afresh: what is behind a parameter may be other memory than before."""
        held = [Held(storage, storage.nbytes()) for storage in weight_storages(self._built)]
        return [each for each in held if each.num_bytes]

    @torch.no_grad()
    def _exchange(self) -> None:
        held = self._held()
        assert [each.num_bytes for each in held] == self._sizes, "weights lie in other storages than at set-up"
        synchronize(self._device)  # other streams may still use them
        self._memory.exchange(held)
        synchronize(self._device)


def reference_policy(state: RunState, provider: ModelProvider, config: RlConfig, watchdog: Watchdog, *,
                     resumed: bool) -> tuple[ReferencePolicy | None, list[str]]:
    """The reference policy that the flags ask for; None with --kl-coeff 0. Collective over the world.

    It is that of --ref-load or --ref-load-hf, without either the weights that the run started from: those that the
    model has now, or, where the run was resumed, those that it began with: of --load where that is not the folder of
    --save and gave weights alone, else of --load-hf or the provider's own flag. Model, optimizers and schedule are the
    same afterwards.

    Args:
        state: the run, its weights loaded.
        provider: the model family.
        config: the algorithm.
        watchdog: told about every wait.
        resumed: the weights have been trained by this run.

    Returns:
        The policy, and a line that says where it is from.

    Raises:
        ValueError: on one rank: there are no such weights, or they do not fit the model, or nobody knows what a resumed
            run started from.
        ReportedElsewhereError: on the other ranks then.
    """
    if not config.kl_coeff:
        return None, []
    found = _source(state, provider, config, watchdog, resumed=resumed)
    policy = ReferencePolicy(state.built, state.platform.device)
    if found is None:
        return policy, ["reference policy: the weights that the run starts from"]
    name, load = found
    load()
    policy.exchange()
    return policy, [f"reference policy: weights from {name}"]


def _source(state: RunState, provider: ModelProvider, config: RlConfig, watchdog: Watchdog, *,
            resumed: bool) -> tuple[str, Callable[[], object]] | None:
    """Name of the weights to read and what reads them into the model; None for those that it has."""
    flags, family = state.config.checkpoint, state.config.model_family
    if config.ref_load:
        folder = _find(state, config.ref_load, "--ref-load", None)
        return str(folder), lambda: load_weights(state, folder, watchdog, "--ref-load")
    if config.ref_load_hf:
        named = _RefLoadHf(config.ref_load_hf)
        return named.model, lambda: _load_hf(state, provider, named, watchdog)
    if not resumed:
        return None
    if flags.load is not None and state.source is not None and state.source.flag == "--save":
        began = _find(state, flags.load, "--load", flags.ckpt_step)
        # Without --finetune it began as a run that had trained already, unless with imported weights.
        if flags.finetune or began.name == paths.RELEASE:
            return str(began), lambda: load_weights(state, began, watchdog, "--load")
    # Of several modules one might have started from random weights: only the whole model's folder names all.
    if flags.load_hf or (flags.load_language_from and not provider.encoders(family)):
        hf = HfPaths(flags.load_hf, flags.load_vision_from, flags.load_language_from)
        return flags.load_hf or flags.load_language_from, lambda: _load_hf(state, provider, hf, watchdog)
    source = provider.megatron_source(family) if isinstance(provider, MegatronSourceProvider) else None
    if source is not None:
        vocab_size = provider.token_spec(family).vocab_size
        return source.path, lambda: load_single_weights(state, source, vocab_size, watchdog)
    raise_on_any_rank(state.grids, (
        f"--kl-coeff {config.kl_coeff} with --load {flags.load}: the run goes on from its checkpoint, which does not "
        "hold the weights that it started from, the reference policy. Name them: --ref-load FOLDER (a checkpoint), "
        "--ref-load-hf FOLDER, or the --load-hf FOLDER that it was started with"))
    raise AssertionError("raised above")


class _RefLoadHf(HfPaths):
    """The whole model, under the name of its own flag."""

    def flag(self, path: str) -> str:
        """The flag that names the folder, with its value."""
        return f"--ref-load-hf {path}"


def _load_hf(state: RunState, provider: ModelProvider, hf: HfPaths, watchdog: Watchdog) -> None:
    with watchdog.on_files("weights of the reference policy"):
        report = load_hf(state.built, state.grids, provider, state.config.model_family, hf,
                         state.config.checkpoint.allowed_differences)
    for note in report.notes:
        logger.info("reference policy: %s", note)
    absent = [f"{module} {name}" for module, names in report.absent.items() for name in names]
    raise_on_any_rank(state.grids, f"{hf.flag(hf.of(LANGUAGE))} does not have all weights of the reference policy; "
                                   f"missing are {', '.join(absent)}" if absent else None)


def _find(state: RunState, given: str, flag: str, step: int | None) -> Path:
    """The checkpoint that a flag names, found by the first rank; nothing in there is changed."""
    error, folder = None, None
    if state.grids.rank == 0:
        try:
            folder = paths.find(Path(given), step, flag, repair=False)
        except (ValueError, OSError) as problem:
            error = str(problem)
        if folder is None and error is None:
            error = f"{flag} {given} " + ("holds no checkpoint" if Path(given).is_dir() else "does not exist")
    raise_on_any_rank(state.grids, error)
    found: Path = broadcast_object(state.grids, folder)
    return found
