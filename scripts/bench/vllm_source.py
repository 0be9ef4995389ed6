"""Give vLLM's own weight-transfer trainers the trainer's weights in the form that they need. Imports vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from mimo.refit.messages import torch_dtype
from mimo.refit.trainer_shards import WholeTensors


class MegatronSource(WeightSource):
    """Whole tensors of a running trainer. Every rank of the world iterates, and the first is vLLM's sender.

    The other ranks get tensors of the right dtype and shape on the meta device, which vLLM's NCCL trainer ignores.

    Args:
        tensors: tensors of this rank's model.
    """

    def __init__(self, tensors: WholeTensors) -> None:
        self._tensors = tensors
        self._metadata = [ParamMeta(entry.name, torch_dtype(entry.dtype), entry.shape) for entry in tensors.entries]

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype on the wire and shape of every tensor, in order, without communication."""
        return list(self._metadata)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the present values of every tensor, one at a time. Collective over the world.

        Raises:
            RuntimeError: a tensor is not what `metadata` says.
        """
        for (entry, tensor), announced in zip(self._tensors, self._metadata, strict=True):
            if ParamMeta(entry.name, tensor.dtype, tuple(tensor.shape)) != announced:
                raise RuntimeError(f"the tensor {entry.name} {tensor.dtype} {list(tensor.shape)} differs from its "
                                   f"metadata, {announced}")
            yield entry.name, tensor
