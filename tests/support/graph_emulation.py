"""CUDA graphs of parts of layers on a CPU: operations are recorded, and replayed on the same tensors.

An emulated graph differs from one of CUDA in that the recorded operations also run when they are captured; what they
write outside of the graph is undone. Before a replay, numbers that graphs of CUDA may have overwritten by then are
replaced by NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mimo.model.graph_parts import without_random_streams
from mimo.model.layer_graphs import Recorder

# Buffers that are filled from outside before a replay.
BUFFERS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors(values: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))


class Graph(TorchDispatchMode):
    """Records what runs inside; `replay` does it again.

    Attributes:
        results: tensors that have been made inside, by storage; without `buffers`.
        buffers: those that have only been allocated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, dict[str, Any], list[torch.Tensor]]] = []
        self.results: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self._outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        assert func._schema.name not in ("aten::_local_scalar_dense", "aten::nonzero"), "the host would wait"
        given = {storage(each) for each in tensors((args, kwargs))}
        if func._schema.is_mutable:
            for each in tensors((args, kwargs)):
                if storage(each) not in self.results | self.buffers | self._outside:
                    whole = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())
                    self._outside[storage(each)] = whole, whole.clone()
        found = func(*args, **kwargs)
        made = [each for each in tensors(found) if storage(each) not in given]
        kept = self.buffers if func._schema.name in BUFFERS else self.results
        kept.update({storage(each): each for each in made})
        if kept is self.results:
            self._operations.append((func, args, kwargs, made))
        return found

    def undo(self) -> None:
        """Put back what has been written outside."""
        for tensor, before in self._outside.values():
            tensor.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again, with the same tensors as results."""
        for func, args, kwargs, made in self._operations:
            # Autograd sees replays of CUDA as little as what is done to `data`.
            args, kwargs = tree_map_only(torch.Tensor, lambda each: each.data, (args, kwargs))
            given = {storage(each) for each in tensors((args, kwargs))}
            again = [each for each in tensors(func(*args, **kwargs)) if storage(each) not in given]
            for old, new in zip(made, again, strict=True):
                old.data.copy_(new)

    def forget(self, *, buffers: bool) -> None:
        """Overwrite results, and buffers if asked for."""
        for each in (*self.results.values(), *(self.buffers.values() if buffers else ())):
            each.data.fill_(float("nan") if each.is_floating_point() else 0)


class Emulation:
    """Captures the passes of the layers of a stage, in the order of their replays."""

    def __init__(self) -> None:
        self._layers: list[Any] = []
        self._forward: list[Graph] = []
        self._backward: list[Graph] = []

    @property
    def recorder(self) -> Recorder:
        """The recorder that `mimo.model.layer_graphs.PassesOfLayers` takes."""
        return self._capture, without_random_streams, nullcontext

    def _capture(self, function: Callable[[], None]) -> Callable[[], None]:
        is_forward = function.__name__ == "_run_forward"
        graph, graphs = Graph(), self._forward if is_forward else self._backward
        number = len(graphs)
        graphs.append(graph)
        layer: Any = function.__self__  # type: ignore[attr-defined]
        if is_forward:
            assert not self._backward and layer not in self._layers
            self._layers.append(layer)
        else:
            assert layer is self._layers[-1 - number], "captured in another order than replayed"
        with graph:
            function()
        graph.undo()

        def replay() -> None:
            if is_forward:
                overwritten = [*self._forward[1:], *self._backward] if number == 0 else []
                graph.forget(buffers=False)
            else:
                # Everything of the layers behind this one is over.
                overwritten = [*self._forward[len(self._forward) - number:], *self._backward[:number]]
            for each in overwritten:
                each.forget(buffers=True)
            graph.replay()

        return replay
