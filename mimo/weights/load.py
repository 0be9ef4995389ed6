"""Loads Hugging Face weights into the modules of a running trainer, in any layout."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mimo.comm import broadcast_object, broadcast_result, gather, raise_known_errors
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel, named_modules_of
from mimo.protocols import LANGUAGE, ModelProvider
from mimo.watchdog.process_exit import ReportedElsewhereError
from mimo.watchdog.watchdog import Watchdog
from mimo.weights import hub
from mimo.weights.configuration import compare_folder
from mimo.weights.match import (
    ModelPiece,
    ModuleMatch,
    check_repeated,
    check_tensor,
    check_values,
    fitted,
    match_source,
    module_pieces,
    replica_group,
    report,
)
from mimo.weights.rules import WeightMap
from mimo.weights.safetensors_io import Catalog, HfSource


@dataclass(frozen=True)
class HfPaths:
    """Folders of Hugging Face weights.

    Attributes:
        model: the whole model (--load-hf).
        vision: the encoders, before `model` (--load-vision-from).
        language: the language module, before `model` (--load-language-from).
        model_flag: flag of `model`.
    """

    model: str = ""
    vision: str = ""
    language: str = ""
    model_flag: str = "--load-hf"

    def of(self, module: str) -> str:
        """Return the folder from which a module is loaded; empty if it keeps its weights."""
        return (self.language if module == LANGUAGE else self.vision) or self.model

    def flag(self, path: str) -> str:
        """Return the flag that names a folder, with its value."""
        flags = {self.model: self.model_flag, self.vision: "--load-vision-from", self.language: "--load-language-from"}
        return f"{flags[path]} {path}"


@dataclass
class LoadReport:
    """Result of a load.

    Attributes:
        schemes: module -> naming scheme of its source.
        absent: module -> Megatron names of tensors that the source may lack and does lack. They keep their values.
        notes: lines for the log: what was not compared, and differences that --allow-difference names.
    """

    schemes: dict[str, str] = field(default_factory=dict)
    absent: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@torch.no_grad()
def load_hf(built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any, paths: HfPaths,
            allowed: Collection[str] = ()) -> LoadReport:
    """Fill the modules of every rank from Hugging Face folders. Collective over the world.

    The caller refreshes the optimizer's copies of the parameters. One rank reads the headers. One replica of each piece
    of a parameter reads the tensors and sends the piece to the other replicas. `allowed` are fields of the
    configuration that may differ from config.json (--allow-difference).

    Raises:
        ValueError: raised on the first rank. Before anything is read: config.json describes a model that computes
            something else. Before anything is written: tensors that are missing, unused, unreadable, of another shape
            or dtype, not covered by the weight map, or that differ from those that they should repeat. Afterwards:
            values that are not finite.
        ReportedElsewhereError: the same, on the other ranks.
    """
    maps = {module: provider.weight_map(family_config, module)
            for module in (*provider.encoders(family_config), LANGUAGE)}
    modules = [module for module in grids.layout.grids if paths.of(module)]
    folders = list(dict.fromkeys(paths.of(module) for module in modules))
    notes = _compare_configurations(grids, provider, family_config, paths, modules, allowed)
    sources = {folder: HfSource(folder, catalog) for folder, catalog in _catalogs(grids, paths, folders).items()}
    pieces = {module: module_pieces(part, grids.collections[module]) for module, part in named_modules_of(built.model)
              if module in modules}
    # Ranks collect what they find and stop together, with one list of everything, before any weight is changed.
    plan, problems = _plan(sources, maps, {module: paths.of(module) for module in modules}, paths)
    problems += [line for module in modules
                 for line in _check_module(plan[module], sources[paths.of(module)].catalog, maps[module],
                                           pieces.get(module, []), grids)]
    problems += _check_files(grids, paths, sources, pieces)
    if grids.rank == 0 and not problems:
        problems += [line for module in modules
                     for line in check_repeated(sources[paths.of(module)], plan[module], maps[module])]
    given = " and ".join(paths.flag(folder) for folder in folders)
    agree(grids, f"{given} does not fit the model", problems)
    for module, held in pieces.items():
        problems += _fill(plan[module], sources[paths.of(module)], held, grids.collections[module])
    agree(grids, f"{given} cannot be trained from", problems)
    for source in sources.values():
        source.close()
    return LoadReport({module: match.scheme.name for module, match in plan.items()},
                      {module: match.absent for module, match in plan.items() if match.absent}, notes)


def download_weights(grids: Grids, paths: HfPaths, watchdog: Watchdog) -> None:
    """Download weights of the hub that a node's cache lacks, by the node's first rank. Collective over the world.

    Raises:
        ValueError: a node cannot download them, or ranks have found different commits of a model.
        ReportedElsewhereError: the same, on the other ranks.
    """
    folders = [folder for folder in dict.fromkeys((paths.model, paths.vision, paths.language)) if folder]
    models = [hub.model_of(folder) for folder in folders]
    if not any(models):
        return
    error = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with watchdog.on_files("download of pretrained weights", is_work=True):
            try:
                for folder in folders:
                    hub.download_weights(paths.flag(folder), folder)
            except ValueError as problem:
                error = str(problem)
    with watchdog.on_files("download of pretrained weights by the first rank of each node"):
        everyone = gather(grids, (error, models))
    problems = [error for error, _ in everyone]
    for rank, (_, found) in enumerate(everyone):
        for folder, model, other in zip(folders, everyone[0][1], found, strict=True):
            if model != other:
                problems[0] = problems[0] or (
                    f"{paths.flag(folder)}: the model changed on the hub while ranks started: rank 0 has {model}, rank "
                    f"{rank} {other}; give its commit, organisation/name@commit")
    raise_known_errors(grids, problems)


def agree(grids: Grids, what: str, problems: list[str]) -> None:
    """Stop every rank of the world if any of them has problems. Collective.

    Raises:
        ValueError: on the first rank, with the problems of all ranks.
        ReportedElsewhereError: on the other ranks.
    """
    lines = [line for of_rank in gather(grids, sorted(set(problems))) for line in of_rank]
    if lines and grids.rank != 0:
        raise ReportedElsewhereError(f"{what}; rank 0 lists why")
    report(what, lines)


def _compare_configurations(grids: Grids, provider: ModelProvider, family_config: Any, paths: HfPaths,
                            modules: Sequence[str], allowed: Collection[str]) -> list[str]:
    """Compare config.json of every folder, read by the first rank. Return notes. Collective; raises as `agree`."""
    problems, notes = [], []
    if grids.rank == 0:
        for folder in dict.fromkeys(paths.of(module) for module in modules):
            chosen = [module for module in modules if paths.of(module) == folder]
            try:
                found, more = compare_folder(provider, family_config, folder, chosen, allowed)
            except ValueError as error:
                problems.append(str(error))
                continue
            problems += [f"{paths.flag(folder)}: {line}" for line in found]
            notes += more
    agree(grids, "the weights belong to a model that computes something else", problems)
    return list(broadcast_object(grids, notes))


def _catalogs(grids: Grids, paths: HfPaths, folders: list[str]) -> dict[str, Catalog]:
    """Return the contents of each folder, which the first rank reads."""
    def read() -> dict[str, Catalog]:
        try:
            return {folder: HfSource(folder).catalog for folder in folders}
        except ValueError as problem:
            raise ValueError(f"{' and '.join(paths.flag(folder) for folder in folders)}: {problem}") from problem

    return broadcast_result(grids, read)


def _plan(sources: Mapping[str, HfSource], maps: Mapping[str, WeightMap], folder_of: Mapping[str, str],
          paths: HfPaths) -> tuple[dict[str, ModuleMatch], list[str]]:
    """Match each module with its source. Return the matches, and lines about missing and unused tensors."""
    plan: dict[str, ModuleMatch] = {}
    problems: list[str] = []
    for folder, source in sources.items():
        wanted = {module: maps[module] for module, chosen in folder_of.items() if chosen == folder}
        others = {module: weight_map for module, weight_map in maps.items() if module not in wanted}
        matches, found = match_source(source.catalog, wanted, others)
        plan |= matches
        problems += [line if len(sources) == 1 else f"{line} [{paths.flag(folder)}]" for line in found]
    return plan, problems


def _check_module(match: ModuleMatch, catalog: Catalog, weight_map: WeightMap, pieces: list[ModelPiece],
                  grids: Grids) -> list[str]:
    """Describe the faults of this rank's pieces; the first rank names tensors that no rank holds. Collective."""
    problems = []
    numbers = {rule.megatron: number for number, rule in enumerate(weight_map.rules)}
    held = torch.zeros(len(numbers), dtype=torch.uint8)
    seen = set()
    for piece in pieces:
        if piece.name in numbers:
            held[numbers[piece.name]] = 1
        elif piece.name not in seen:
            problems.append(f"no rule: {match.module} {piece.name} {list(piece.shape)} of the model is in no rule of "
                            "its weight map")
        if piece.name in match.rules and piece.name not in seen:
            match.rules[piece.name] = fitted(match.rules[piece.name], piece.shape)
            problems += check_tensor(match, match.rules[piece.name], catalog, piece.shape, piece.tensor.dtype)
        seen.add(piece.name)
    if len(held):
        dist.all_reduce(held, op=dist.ReduceOp.MAX, group=grids.host)
    if dist.get_rank(grids.host) == 0:
        problems += [f"no parameter: {match.module} {name} of the weight map is not in the model"
                     for name, number in numbers.items() if not held[number]]
    return problems


def _check_files(grids: Grids, paths: HfPaths, sources: Mapping[str, HfSource],
                 pieces: Mapping[str, list[ModelPiece]]) -> list[str]:
    """Describe the files that a reading rank does not find as the first rank did."""
    reads = {paths.of(module) for module, held in pieces.items()
             if any(replica_group(piece, grids.collections[module]).rank() == 0 for piece in held)}
    return [f"on rank {grids.rank}: {line}" for folder in sorted(reads) for line in sources[folder].missing_files()]


def _fill(match: ModuleMatch, source: HfSource, pieces: list[ModelPiece], groups: Any) -> list[str]:
    """Copy a module's tensors into its pieces, one global tensor at a time, in the same order on every rank.

    Returns:
        Lines about wrong values that this rank has read.
    """
    problems = []
    by_name: dict[str, list[ModelPiece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for rule in match.rules.values():
        # Ascending, because the ranks of a group have to send and receive their pieces in the same order.
        held = sorted(by_name.get(rule.megatron, []), key=lambda piece: piece.box.starts)
        if not held:
            continue
        group = replica_group(held[0], groups)
        whole = None
        if group.rank() == 0:
            parts = {name: source.read(name, rule.row_slice) for name in match.sources(rule)}
            problems += [line for name, part in parts.items()
                         for line in check_values(name, part, held[0].tensor.dtype)]
            whole = rule.convert.to_megatron(list(parts.values()))
        for piece in held:
            if group.size() == 1:
                assert whole is not None
                piece.tensor.copy_(whole[piece.box.slices])
                continue
            buffer = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, device=piece.tensor.device)
            if whole is not None:
                buffer.copy_(whole[piece.box.slices])
            # Every backend can send bytes.
            dist.broadcast(buffer.flatten().view(torch.uint8), src=dist.get_global_rank(group, 0), group=group)
            piece.tensor.copy_(buffer)
    return problems
