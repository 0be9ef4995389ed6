"""The reference policy: fixed weights on the host, which replace the policy's weights for a forward pass.

Both use the run's own model, so the reference has its layout, and each rank keeps only its own shards. The contents of
storages are exchanged, as in `mimo.rl.offload`. Parameters, buffers and Megatron Core's contiguous buffers remain the
objects that optimizers and hooks refer to, and the policy's weights come back with the same bits.

A folder of checkpoints grows and loses old ones, so that the run's own checkpoints record which one was the reference
(`RunState.references`): by flag (`--load` for the weights that the run started from, or `--ref-load`) the given
`folder`, and the name of the `checkpoint` in it, which is empty if the folder is the checkpoint itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mimo.checkpoint import paths
from mimo.checkpoint.load import load_weights
from mimo.checkpoint.reader import read_common
from mimo.checkpoint.state import RunState, is_imported
from mimo.comm import broadcast_result, raise_on_any_rank
from mimo.config.rl import RlConfig
from mimo.model.build import WEIGHTS, BuiltModel
from mimo.protocols import LANGUAGE, MegatronSourceProvider, ModelProvider
from mimo.rl.offload import Held, HostMemory, synchronize, weight_storages
from mimo.watchdog.watchdog import Watchdog
from mimo.weights.import_megatron import load_single_weights
from mimo.weights.load import HfPaths, download_weights, load_hf

logger = logging.getLogger(__name__)


class ReferencePolicy:
    """Copy of this rank's present weights and buffers. The constructor is collective over each module's ranks.

    The copy takes as much host memory as they take on the device, pinned on CUDA. An exchange needs one more block of
    `mimo.rl.offload` on the device. There is no second copy: during a forward pass of the reference, the policy's
    weights are on the host. The weights must be on the device.
    """

    def __init__(self, built: BuiltModel, device: torch.device) -> None:
        self._built, self._device = built, device
        self._memory = HostMemory(pinned=device.type == "cuda")
        with self._complete():
            held = self._held()
            self._sizes = [each.num_bytes for each in held]
            self._memory.save(held)
            synchronize(device)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the weights of the reference. Collective over each module's ranks.

        Only forward passes without gradient may run inside, but no step, refit or checkpoint.

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
        """Swap the weights of the model and of the reference for good. Collective like `in_place`."""
        with self._complete():
            self._exchange()

    @contextmanager
    def _complete(self) -> Iterator[None]:
        """Context with complete parameters: finish open gathers of an overlapped step, and let none begin inside."""
        self._built.residency.require("the reference policy", WEIGHTS)
        self._built.model.disable_forward_pre_hook()
        try:
            yield
        finally:
            self._built.model.enable_forward_pre_hook()

    def _held(self) -> list[Held]:
        """Look up the storages again, because a parameter's memory may have changed."""
        held = [Held(storage, storage.nbytes()) for storage in weight_storages(self._built)]
        return [each for each in held if each.num_bytes]

    @torch.no_grad()
    def _exchange(self) -> None:
        held = self._held()
        assert [each.num_bytes for each in held] == self._sizes, "weights lie in other storages than at set-up"
        synchronize(self._device)  # other streams may still use the weights
        self._memory.exchange(held)
        synchronize(self._device)


def reference_policy(state: RunState, provider: ModelProvider, config: RlConfig, watchdog: Watchdog, *,
                     resumed: bool) -> tuple[ReferencePolicy | None, list[str]]:
    """Build the reference policy that the flags ask for, or None with --kl-coeff 0. Collective over the world.

    Its weights come from --ref-load or --ref-load-hf. Without these flags it has the weights that the run started from.
    In a new run the model has them now. A resumed run reads them again: from --load, if that is not the folder of
    --save and gave only weights, otherwise from --load-hf or the provider's own flag. A checkpoint that the run has
    read before is read again, also if its folder has newer ones by now. Model, optimizers and schedule are unchanged
    afterwards. `resumed` says whether this run has already trained the weights.

    Returns:
        The policy, and a line for the log that says where it is from.

    Raises:
        ValueError: the weights do not exist any more or do not fit the model, or it is not known what a resumed run
            started from; raised on one rank.
        ReportedElsewhereError: the same, on the other ranks.
    """
    source, given = state.source, state.config.checkpoint.load
    if source is not None and resumed:
        # Checkpoints of older versions have no records.
        state.references = broadcast_result(state.grids, lambda: read_common(source.folder).get("references", {}))
    elif source is not None and source.flag == "--load" and given is not None:
        # Recorded even without --kl-coeff, because a resumed run may have one.
        state.references["--load"] = _record(given, source.folder)
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
    """Return the name of the weights and a function that reads them; None if the model has them already."""
    flags, family = state.config.checkpoint, state.config.model_family
    if config.ref_load:
        folder = _find(state, config.ref_load, "--ref-load", None)
        state.references["--ref-load"] = _record(config.ref_load, folder)
        return str(folder), lambda: load_weights(state, folder, watchdog, "--ref-load")
    if config.ref_load_hf:
        named = HfPaths(config.ref_load_hf, model_flag="--ref-load-hf")
        return named.model, lambda: _load_hf(state, provider, named, watchdog)
    if not resumed:
        return None
    if flags.load is not None and state.source is not None and state.source.flag == "--save":
        began = _find(state, flags.load, "--load", flags.ckpt_step)
        # Without --finetune the run continued one that had been trained, unless the checkpoint has imported weights.
        if flags.finetune or is_imported(read_common(began)):
            state.references["--load"] = _record(flags.load, began)
            return str(began), lambda: load_weights(state, began, watchdog, "--load")
    # Only a folder with the whole model is certain: with several modules, one may have started from random weights.
    if flags.load_hf or (flags.load_language_from and not provider.encoders(family)):
        hf = HfPaths(flags.load_hf, flags.load_vision_from, flags.load_language_from)
        return flags.load_hf or flags.load_language_from, lambda: _load_hf(state, provider, hf, watchdog)
    source = provider.megatron_source(family) if isinstance(provider, MegatronSourceProvider) else None
    if source is not None:
        vocab_size = provider.token_spec(family).vocab_size
        return source.path, lambda: load_single_weights(state, source, vocab_size, watchdog)
    first = state.references.get("--load")
    hint = "" if first is None else f". It started with the weights of {Path(first['folder']) / first['checkpoint']}"
    raise_on_any_rank(state.grids, (
        f"--kl-coeff {config.kl_coeff} with --load {flags.load}: the run goes on from its checkpoint, which does not "
        "hold the weights that it started from, the reference policy. Name them: --ref-load FOLDER (a checkpoint), "
        f"--ref-load-hf FOLDER, or the --load-hf FOLDER that it was started with{hint}"))
    raise AssertionError("raised above")


def _load_hf(state: RunState, provider: ModelProvider, hf: HfPaths, watchdog: Watchdog) -> None:
    download_weights(state.grids, hf, watchdog)
    with watchdog.on_files("weights of the reference policy"):
        report = load_hf(state.built, state.grids, provider, state.config.model_family, hf,
                         state.config.checkpoint.allowed_differences)
    for note in report.notes:
        logger.info("reference policy: %s", note)
    absent = [f"{module} {name}" for module, names in report.absent.items() for name in names]
    raise_on_any_rank(state.grids, f"{hf.flag(hf.of(LANGUAGE))} does not have all weights of the reference policy; "
                                   f"missing are {', '.join(absent)}" if absent else None)


def _record(given: str, folder: Path) -> dict[str, str]:
    """Describe for the run's checkpoints which checkpoint was read from a given folder."""
    return {"folder": given, "checkpoint": "" if folder == Path(given) else folder.name}


def _find(state: RunState, given: str, flag: str, step: int | None) -> Path:
    """Find the checkpoint that a flag names, on the first rank. Nothing in the folder is changed.

    It is the recorded one if the run has read one from the same folder before.

    Raises:
        ValueError: there is none, or it is not complete, or the recorded one is gone; on the first rank.
        ReportedElsewhereError: the same, on the other ranks.
    """
    def find() -> Path:
        root, recorded = Path(given), state.references.get(flag)
        if recorded and recorded["checkpoint"] and os.path.realpath(recorded["folder"]) == os.path.realpath(root):
            folder = root / recorded["checkpoint"]
            if not (folder / paths.METADATA).is_file():
                raise ValueError(
                    f"{flag} {given}: the reference policy of this run has the weights of {folder.name}, which is not "
                    "there any more; put it back, or give --ref-load another checkpoint, or --ref-load-hf FOLDER")
            return folder
        found = paths.find(root, step, flag, repair=False)
        if found is None:
            raise ValueError(f"{flag} {given} " + ("holds no checkpoint" if root.is_dir() else "does not exist"))
        return found

    return broadcast_result(state.grids, find)
