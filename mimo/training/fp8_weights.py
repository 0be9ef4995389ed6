"""Memory of bfloat16 weights whose FP8 copies are enough between updates (--fp8-primary-weights)."""

from __future__ import annotations

import torch

from mimo.compat import copy_together
from mimo.config.trainer import RunConfig
from mimo.model.build import BuiltModel
from mimo.model.fp8 import PrimaryWeights
from mimo.training.optimizer import HeteroOptimizer


class Fp8Weights:
    """Gives the memory of bfloat16 weights back between updates, where products read FP8 copies of them.

    The optimizer has float32 weights. An update rounds them to bfloat16, gathers them over data-parallel ranks, and
    quantises them, as it does without this class; so all results have the same bits. Only in this time do the buffers
    of `DistributedDataParallel` that hold such weights have memory, when there are no activations. Trained weights in
    the same buffers that are no operands of FP8 products, such as norms and embeddings, have memory of their own, which
    is there during updates, too.

    A checkpoint and whatever else reads weights calls `BuiltModel.finish_gathers`, which makes the bfloat16 weights
    from the float32 ones. They stay until the next pass.

    Args:
        built: the model, before its first pass.
        optimizer: its optimizers, which have distributed state.
        config: the run.
        impl: `local` or `transformer_engine`.

    Raises:
        ValueError: see `PrimaryWeights`.
    """

    def __init__(self, built: BuiltModel, optimizer: HeteroOptimizer, config: RunConfig, impl: str) -> None:
        self._built, self._optimizer = built, optimizer
        self._primary = [PrimaryWeights(wrapped, impl, fp8) for name, wrapped in built.wrapped.items()
                         if (fp8 := config.model.fp8(name)) is not None]
        # Storages and their bytes; parameters outside FP8 products, with their places in these storages.
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Whether there are FP8 copies, whether the storages have memory, and whether that holds the present weights.
        self._has_copies, self._has_memory, self._has_weights = False, True, True
        built.restore_weights = self.restore

    def release(self) -> None:
        """Give the memory back, unless that has been done. Needed before each pass; makes the first FP8 copies."""
        if not self._has_copies:
            self._begin()
        if self._has_memory:
            self._resize(full=False)
        self._has_weights = False

    def allocate(self) -> None:
        """Get the memory for an update, before the optimizer looks up where the weights are."""
        if not self._has_memory:
            self._resize(full=True)

    @torch.no_grad()
    def finish_update(self, *, updated: bool) -> None:
        """Make new FP8 copies if the update was not skipped, and give the memory back."""
        if updated:
            if self._others:
                copy_together([parameter for parameter, _ in self._others], [place for _, place in self._others])
            for primary in self._primary:
                primary.renew()
        self.release()

    @torch.no_grad()
    def restore(self) -> None:
        """Make the bfloat16 weights of the last update again. Collective over the ranks of each module."""
        if self._has_weights:
            return
        self.allocate()
        self._optimizer.write_weights()
        for wrapped in self._built.wrapped.values():
            wrapped.start_param_sync(force_sync=True)
        self._has_weights = True

    @torch.no_grad()
    def _begin(self) -> None:
        stored: set[torch.nn.Parameter] = set()
        for primary in self._primary:
            primary.renew()
            stored.update(primary.parameters)
        for wrapped in self._built.wrapped.values():
            for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
                if stored.isdisjoint(buffer.params):
                    continue
                storage = buffer.param_data.untyped_storage()
                self._storages.append((storage, storage.nbytes()))
                for parameter in buffer.params:
                    if parameter not in stored:
                        place = parameter.data
                        parameter.data = place.clone()
                        self._others.append((parameter.data, place))
        self._has_copies = True

    def _resize(self, *, full: bool) -> None:
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes if full else 0)
        self._has_memory = full
