"""Plans what a worker takes in, and how, by tracing the loader of its model. A tensor that does not fit is an error."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform

from mimo.refit.loader_trace import Recording, check_coverage, record
from mimo.refit.messages import view_of
from mimo.refit.tensor_slices import RecvSpec, TensorMeta

# A tensor goes into a worker directly, as boxes of live tensors, or as a whole through vLLM's loader.
#
# Tensors go directly only into modules that are known to leave parameters as they were loaded (the tables below). All
# tensors of a module take the same way, because vLLM reloads whole modules.


# Quantization methods, by class name, that keep what is loaded. On CPUs, vLLM packs these weights for its kernels.
KEEPING_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
# Expert methods, and the kernels for which they keep w13 and w2. For others they swap, shuffle or pad them, sometimes
# in place.
EXPERT_METHODS = frozenset({"UnquantizedFusedMoEMethod"})
KEEPING_EXPERT_KERNELS = frozenset({"TRITON", "BATCHED_TRITON"})
# Modules without a quantization method that compute from their parameters in each forward pass and keep nothing else.
PLAIN_MODULES = frozenset({
    "RMSNorm", "GemmaRMSNorm", "RMSNormGated", "Mixer2RMSNormGated", "LayerNorm", "Conv2dLayer", "Conv3dLayer",
    "Conv2d", "Embedding", "Linear", "MambaMixer2", "CLIPVisionEmbeddings", "SiglipVisionEmbeddings",
})

# Tensors that vLLM writes in place, too, so that it does not matter which other modules refer to them.
IN_PLACE = frozenset({"e_score_correction_bias"})


def routes(model: torch.nn.Module, recording: Recording, entries: Sequence[TensorMeta]) -> RecvSpec:
    """Plan which tensors a worker takes in as boxes, and which as a whole because it has to.

    Raises:
        ValueError: an entry that must stay float32 would be rounded by a parameter of another dtype.
    """
    written = {name: _paths(recording, name) for name in (*recording.slices, *recording.computed)}
    for entry in entries:
        for path in sorted(written.get(entry.name, ())):
            dtype = recording.layouts[path].dtype
            if entry.keep_fp32 and dtype != "float32":
                raise ValueError(f"{entry.name} must keep float32, but the engine holds it as {dtype} in {path}")
    dtypes = {entry.name: entry.dtype for entry in entries}
    owners = _owners(model)
    # Modules inside others that derive tensors after loading, such as kv_b_proj, which MLA attention absorbs.
    processed = {inner for module in model.modules() if hasattr(module, "process_weights_after_loading")
                 for inner in module.modules()}
    kept = {module for module in model.modules() if _keeps(module)} - processed
    modules = {name: {module for path in paths for module in owners[path]} for name, paths in written.items()}
    # Modules that get whole tensors: those that are not known to keep what is loaded, those with a part that the loader
    # fills with unknown values, and those with a tensor that is computed or has changed since it was loaded.
    whole = {module for touched in modules.values() for module in touched if module not in kept}
    whole |= {module for write in recording.constants if write.value is None for module in owners[write.path]}
    unchanged: dict[tuple[str, str], bool] = {}
    for name, paths in written.items():
        keys = [(path, dtypes[name]) for path in paths]
        unchanged |= {key: _is_unchanged(model, recording, *key) for key in keys if key not in unchanged}
        if name in recording.computed or not all(map(unchanged.__getitem__, keys)):
            whole |= modules[name]
    # A module that gets one tensor through the loader gets all of them so, and they may write to further modules.
    loader: set[str] = set()
    while added := {name for name, touched in modules.items() if name not in loader and touched & whole}:
        loader |= added
        whole = whole.union(*(modules[name] for name in added))
    direct = [part for entry in entries if entry.name not in loader for part in recording.slices.get(entry.name, ())]
    return RecvSpec(tuple(direct), tuple(entry.name for entry in entries if entry.name in loader))


def _owners(model: torch.nn.Module) -> dict[str, list[torch.nn.Module]]:
    """Return, for every path, the modules that own its tensor; several if it is shared."""
    holders: dict[tuple[int, str], list[torch.nn.Module]] = {}
    paths: dict[str, tuple[int, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module.named_parameters(recurse=False, remove_duplicate=False),
                             *module.named_buffers(recurse=False, remove_duplicate=False)):
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
    live = getattr(module, name)
    assert isinstance(live, torch.Tensor), path
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


# Pick the naming scheme that the engine's loader accepts in full: every one of its names writes something.


NAMED = 3  # names in an error message
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert
Candidates = Mapping[str, Mapping[str, Sequence[TensorMeta]]]
"""Module -> name of a naming scheme -> its entries."""


Probes = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Module -> name of a naming scheme -> response of a worker's loader to it, as plain data: `refused`, the first few
names that it raises on, with the error, and `silent`, the names that write nothing on this worker."""


def probe_schemes(model: torch.nn.Module, candidates: Candidates) -> dict[str, dict[str, dict[str, Any]]]:
    """Try the naming schemes of every module on a live model, without any effect on it, up to one that fits.

    Of names that differ only in the numbers of their layer and expert, the first and the last are tried: a mixture of
    experts has tens of thousands of names. `record` sees all names of the scheme that is chosen.
    """
    probes: dict[str, dict[str, dict[str, Any]]] = {}
    for module, schemes in candidates.items():
        for scheme, entries in schemes.items():
            alike: dict[str, list[int]] = {}
            for index, entry in enumerate(entries):
                alike.setdefault(NUMBER.sub("#", entry.name), []).append(index)
            ends = sorted({index for group in alike.values() for index in (group[0], group[-1])})
            recording = record(model, [entries[index] for index in ends], max_refused=NAMED)
            probes.setdefault(module, {})[scheme] = {"refused": recording.refused, "silent": list(recording.untaken)}
            if not recording.refused and not recording.untaken:
                break
    return probes


def choose_scheme(probes: Sequence[Probes]) -> dict[str, str]:
    """Choose each module's naming scheme from what all workers found.

    Args:
        probes: of every worker. A name may write nothing on one (a layer of another pipeline stage, an expert of
            another rank), but not on all.

    Returns:
        For each module the first naming scheme that no worker refuses and of which every name writes something.

    Raises:
        ValueError: a module has no such naming scheme; for each naming scheme what was refused or silently ignored.
    """
    chosen = {}
    for module in probes[0]:
        # A worker on which a scheme fits has not tried those after it. If another worker refuses that scheme, the trace
        # of all names shows whether the next one fits here, too.
        tried = dict.fromkeys(scheme for worker in probes for scheme in worker[module])
        faults = {scheme: _fault([worker[module][scheme] for worker in probes if scheme in worker[module]])
                  for scheme in tried}
        fitting = [scheme for scheme, fault in faults.items() if not fault]
        if not fitting:
            reasons = "; ".join(f"as {scheme}, {fault}" for scheme, fault in faults.items())
            raise ValueError(f"the engine's loader takes the names of module {module} in no naming scheme: {reasons}")
        chosen[module] = fitting[0]
    return chosen


def _fault(workers: Sequence[Mapping[str, Any]]) -> str:
    for worker in workers:
        for name, reason in worker["refused"].items():
            return f"{name} is refused ({reason})"
    silent = set.intersection(*(set(worker["silent"]) for worker in workers))
    ignored = [name for name in workers[0]["silent"] if name in silent]
    more = f" and {len(ignored) - NAMED} more" if len(ignored) > NAMED else ""
    return f"{', '.join(ignored[:NAMED])}{more} are ignored without a word" if ignored else ""


@dataclass(frozen=True)
class Taken:
    """Tensors that a worker takes in.

    Attributes:
        spec: the tensors, under the trainer's names.
        loader_names: name in the trainer -> name in the loader.
        loader_layers: paths of the modules whose parameters are loaded rather than written.
        groups: names that the loader has to get together, under the trainer's names, with the paths of their modules.
    """

    spec: RecvSpec
    loader_names: dict[str, str]
    loader_layers: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()


def probe_offered(model: torch.nn.Module, entries: Sequence[TensorMeta],
                  offered: Sequence[Mapping[str, Any]]) -> Probes:
    """Try each naming scheme that the trainer offers with this worker's loader, if there is a choice.

    All workers have the same choices. See `mimo.refit.trainer_shards.module_schemes` for `offered`.
    """
    names = _distinct_names(offered)
    own = {part["module"]: entries[part["first"]:part["first"] + part["count"]] for part in offered}
    open_choices = {module: {scheme: _renamed(own[module], each) for scheme, each in schemes.items()}
                    for module, schemes in names.items() if len(schemes) > 1}
    return probe_schemes(model, open_choices)


def plan_taken(model: torch.nn.Module, entries: Sequence[TensorMeta], offered: Sequence[Mapping[str, Any]],
               route: str, probes: Sequence[Probes]) -> Taken:
    """Plan what a worker takes in, given the results of `probe_offered` of every worker.

    Args:
        model: the live model, which does not change.
        entries: every tensor of the chunk plan.
        offered: see `mimo.refit.trainer_shards.module_schemes`.
        route: see `RefitOptions`.
        probes: may be empty if there is no choice. All workers choose the naming schemes together.

    Raises:
        ValueError: no naming scheme fits, nothing fills some tensors of the model, or one would lose precision.
    """
    names = _distinct_names(offered)
    chosen = {module: next(iter(schemes)) for module, schemes in names.items()}
    if any(probes):
        chosen |= choose_scheme(probes)
    loader_names = [name for module, schemes in names.items() for name in schemes[chosen[module]]]
    # The trace is in the loader's names. `own` leads back to the trainer's, which everything outside of here uses.
    own = {name: entry.name for entry, name in zip(entries, loader_names, strict=True)}
    renamed = _renamed(entries, loader_names)
    recording = record(model, renamed)
    check_coverage(model, recording)
    spec = routes(model, recording, renamed)
    if route == "loader":
        taken = recording.slices.keys() | recording.computed.keys()
        spec = RecvSpec((), tuple(name for name in loader_names if name in taken))
    return Taken(
        RecvSpec(tuple(part if own[part.name] == part.name else dataclasses.replace(part, name=own[part.name])
                       for part in spec.direct),
                 tuple(own[name] for name in spec.loader)),
        dict(zip(own.values(), own, strict=True)), _layers(model, recording, spec.loader),
        tuple((tuple(own[name] for name in names), layers)
              for names, layers in loader_groups(model, recording, spec.loader)))


def _distinct_names(offered: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return module -> naming scheme -> names of its entries. Of schemes that give the same names, one is kept."""
    found = {}
    for part in offered:
        distinct = {tuple(names): scheme for scheme, names in reversed(part["styles"].items())}
        found[part["module"]] = {scheme: names for names, scheme in reversed(distinct.items())}
    return found


def _renamed(entries: Sequence[TensorMeta], names: Sequence[str]) -> list[TensorMeta]:
    # `dataclasses.replace` would take almost three times as long.
    return [entry if entry.name == name else TensorMeta(name, entry.dtype, entry.shape, entry.keep_fp32)
            for entry, name in zip(entries, names, strict=True)]


def loader_groups(model: torch.nn.Module, recording: Recording,
                  loader: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Group names that go through the loader, so that no module gets its tensors from two groups.

    Modules inside an attention layer belong together, because it derives weights from all of them (latent attention).

    Returns:
        For each group its names, in order, and the paths of the modules that they are loaded into.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    together = [[id(inner) for inner in module.modules()] for module in model.modules()
                if isinstance(module, (Attention, MLAAttention))]
    owners = _owners(model)
    touched = {name: {id(module) for path in _paths(recording, name) for module in owners[path]} for name in loader}
    leaders: dict[int, int] = {}

    def leader(item: int) -> int:
        while leaders.setdefault(item, item) != item:
            item = leaders[item]
        return item

    for items in (*touched.values(), *together):
        first, *others = (leader(item) for item in items)
        for other in others:
            leaders[leader(other)] = leader(first)
    groups: dict[int, list[str]] = {}
    for name in loader:
        groups.setdefault(leader(next(iter(touched[name]))), []).append(name)
    return [(tuple(names), _layers(model, recording, names)) for names in groups.values()]


def _paths(recording: Recording, name: str) -> set[str]:
    """Return the paths of the tensors that a name is loaded into."""
    return ({part.address.tensor for part in recording.slices.get(name, ())}
            | {write.path for write in recording.computed.get(name, ())})


def _layers(model: torch.nn.Module, recording: Recording, loader: Iterable[str]) -> tuple[str, ...]:
    """Return paths of the modules into which loader names are loaded."""
    paths = {path for name in loader for path in _paths(recording, name)}
    owners = {path.rpartition(".")[0] for path in paths}
    return tuple(path for path, _ in model.named_modules() if path in owners)
