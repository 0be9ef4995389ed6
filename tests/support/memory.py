"""Peak memory of tensors."""

from __future__ import annotations

from typing import Any

import torch


def peak_bytes(call: Any) -> int:
    """Most bytes of tensors that are alive at once during a call, what it reads from files included."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.alive: dict[int, tuple[Any, int]] = {}
            self.peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                    storage = StorageWeakRef(tensor.untyped_storage())
                    _, known = self.alive.get(storage.cdata, (None, 0))
                    self.alive[storage.cdata] = storage, max(known, tensor.nbytes)
            self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
            self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
            return result

    with Count() as count:
        call()
    return count.peak
