"""Which way each tensor goes into a worker: straight into its live tensors, or whole through vLLM's loader.

Straight is only for modules that are known to leave their parameters as they were loaded (the tables below), and all
tensors of a module go one way, since vLLM reloads whole modules. Everything else is the loader's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform

from mimo.refit.record import Recording
from mimo.refit.slots import Entry, Slot, Wants
from mimo.refit.tracing import view_of

# Quantization methods, by class name, that keep what is loaded; on CPUs vLLM packs these weights for its kernels.
KEEPING_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
# Expert methods, and the kernels for which they keep w13 and w2: others swap, shuffle or pad them, some in place.
EXPERT_METHODS = frozenset({"UnquantizedFusedMoEMethod"})
KEEPING_EXPERT_KERNELS = frozenset({"TRITON", "BATCHED_TRITON"})
# Modules without a method of their own that compute from their parameters at each forward pass and keep nothing.
PLAIN_MODULES = frozenset({
    "RMSNorm", "GemmaRMSNorm", "RMSNormGated", "Mixer2RMSNormGated", "LayerNorm", "Conv2dLayer", "Conv3dLayer",
    "Conv2d", "Embedding", "Linear", "MambaMixer2", "CLIPVisionEmbeddings", "SiglipVisionEmbeddings",
})

# Written in place by vLLM too, wherever else a module refers to them: what they are in those modules does not matter.
IN_PLACE = frozenset({"e_score_correction_bias"})


def routes(model: torch.nn.Module, recording: Recording, entries: Sequence[Entry]) -> Wants:
    """What a worker takes in, box by box where it can and whole tensors where it must.

    Args:
        model: the live model.
        recording: of its loader.
        entries: those that were recorded.

    Raises:
        ValueError: an entry that must keep float32 would be rounded by a parameter of another dtype.
    """
    _check_precision(recording, entries)
    dtypes = {entry.name: entry.dtype for entry in entries}
    owners = _owners(model)
    kept = {module for module in model.modules() if _keeps(module)} - _processed(model)
    written = {name: {slot.address.tensor for slot in slots} for name, slots in recording.slots.items()}
    written |= {name: {write.path for write in writes} for name, writes in recording.computed.items()}
    modules = {name: {module for path in paths for module in owners[path]} for name, paths in written.items()}
    whole = {module for touched in modules.values() for module in touched if module not in kept}
    whole |= {module for write in recording.constants if write.value is None for module in owners[write.path]}
    for name, paths in written.items():
        if name in recording.computed or not all(_is_unchanged(model, recording, path, dtypes[name]) for path in paths):
            whole |= modules[name]
    loader = _closure(whole, modules)
    return Wants(_in_order(recording, entries, loader),
                 tuple(entry.name for entry in entries if entry.name in loader))


def plain_buffers(recording: Recording, device: str = "cpu") -> tuple[dict[str, torch.Tensor], Wants]:
    """Tensors of loading-time shape, of zeros, and the boxes that fill them: the direct route without an engine.

    Args:
        recording: of a worker's loader.
        device: where the tensors are.

    Returns:
        A tensor for each one that is filled, by path, and the wanted boxes; names that are computed with are the
        loader's here too.
    """
    slots = [slot for group in recording.slots.values() for slot in group]
    buffers = {}
    for path in dict.fromkeys(slot.address.tensor for slot in slots):
        layout = recording.layouts[path]
        buffers[path] = torch.empty_strided(layout.view.sizes, layout.view.strides, device=device,
                                            dtype=getattr(torch, layout.dtype)).zero_()
    return buffers, Wants(tuple(slots), tuple(recording.computed))


def _check_precision(recording: Recording, entries: Iterable[Entry]) -> None:
    for entry in entries:
        paths = {slot.address.tensor for slot in recording.slots.get(entry.name, ())}
        paths |= {write.path for write in recording.computed.get(entry.name, ())}
        for path in sorted(paths):
            dtype = recording.layouts[path].dtype
            if entry.keep_fp32 and dtype != "float32":
                raise ValueError(f"{entry.name} must keep float32, but the engine holds it as {dtype} in {path}")


def _owners(model: torch.nn.Module) -> dict[str, list[torch.nn.Module]]:
    """Modules that have a tensor of a path as their own, for every path; several where it is shared."""
    holders: dict[tuple[int, str], list[torch.nn.Module]] = {}
    paths: dict[str, tuple[int, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            path = f"{prefix}.{name}" if prefix else name
            paths[path] = (id(tensor), path if name in IN_PLACE else "")
            known = holders.setdefault(paths[path], [])
            if not any(module is one for one in known):
                known.append(module)
    return {path: holders[key] for path, key in paths.items()}


def _is_unchanged(model: torch.nn.Module, recording: Recording, path: str, dtype: str) -> bool:
    """Whether a live tensor is laid out as when it was loaded, and has the dtype of the wire."""
    parent, _, name = path.rpartition(".")
    module, layout = model.get_submodule(parent), recording.layouts[path]
    live = module._parameters[name] if name in module._parameters else module._buffers[name]
    assert live is not None, path
    view = view_of(live)
    same = (view.sizes, view.strides) == (layout.view.sizes, layout.view.strides)
    return same and str(live.dtype) == f"torch.{layout.dtype}" == f"torch.{dtype}"


def _keeps(module: Any) -> bool:
    """Whether a module's parameters stay as and where they were loaded."""
    if not hasattr(module, "quant_method") or module.quant_method is None:
        return type(module).__name__ in PLAIN_MODULES
    method = type(module.quant_method).__name__
    if method in EXPERT_METHODS:
        # Load balancing moves experts between ranks while the engine runs.
        return (module.quant_method.unquantized_backend.name in KEEPING_EXPERT_KERNELS
                and not module.moe_config.moe_parallel_config.enable_eplb and not current_platform.is_rocm())
    return method in KEEPING_METHODS and not current_platform.is_cpu()


def _processed(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Modules inside others that derive tensors of their own after loading (kv_b_proj, absorbed by MLA attention)."""
    return {inner for module in model.modules() if hasattr(module, "process_weights_after_loading")
            for inner in module.modules()}


def _closure(whole: set[torch.nn.Module], modules: dict[str, set[torch.nn.Module]]) -> set[str]:
    """Names of the loader's modules, and of all modules that these names write too, until nothing is added."""
    loader: set[str] = set()
    while True:
        added = {name for name, touched in modules.items() if name not in loader and touched & whole}
        if not added:
            return loader
        loader |= added
        whole = whole.union(*(modules[name] for name in added))


def _in_order(recording: Recording, entries: Iterable[Entry], loader: set[str]) -> tuple[Slot, ...]:
    return tuple(slot for entry in entries if entry.name not in loader for slot in recording.slots.get(entry.name, ()))
