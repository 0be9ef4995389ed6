"""`mimo inspect`: what a checkpoint holds, whether it is whole, and what differs from a run's configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mimo.checkpoint.differences import flat_config
from mimo.commands.compare import (
    WEIGHTS,
    Contents,
    Row,
    StoredInfo,
    damage,
    flag_differences,
    read_contents,
    rows_of,
    tensor_differences,
)
from mimo.commands.convert import named_providers, refuse_named_code
from mimo.commands.flags import InspectFlags, checkpoint_folder
from mimo.config.cli import parse
from mimo.text import counted, format_bytes, span, table

_TITLES = {WEIGHTS: "weights", "exp_avg": "optimizer, first moment (exp_avg)",
           "exp_avg_sq": "optimizer, second moment (exp_avg_sq)",
           "fp32_param": "optimizer, fp32 weights (fp32_param)",
           "master_param": "optimizer, low bits of fp32 weights (master_param)"}
_AXES = ("tp", "cp", "dp", "pp", "ep", "expt_tp")


def text_report(contents: Contents, report: Mapping[str, Any], *, every_tensor: bool) -> str:
    """Describe a checkpoint in a few dozen lines, with its differences and damage in `report`.

    `every_tensor` also lists optimizer state and single layers.
    """
    parts = [[str(contents.folder), *(f"  {line}" for line in _progress(contents))], _grids(contents)]
    for module in contents.modules:
        tensors = contents.of(module)
        parts.append([f"module {module}", *_tensors(tensors, every_tensor=every_tensor)])
        parts.append(_totals(module, tensors))
    parameters = sum(tensor.numel for tensor in contents.tensors if tensor.kind == WEIGHTS)
    parts.append([f"{parameters:,} parameters; {counted(len(contents.files), 'file')}, "
                  f"{format_bytes(sum(contents.files.values()))} on disk"])
    if "differences" in report:
        parts += [_listed(f"{what}s that differ", report["differences"][f"{what}s"], f"no {what} differs")
                  for what in ("flag", "tensor")]
    if "damage" in report:
        parts.append(_listed("DAMAGED", report["damage"], "verified: every item is what was saved"
                             if not report["notes"] else "nothing damaged was found"))
        parts += [[f"note: {note}"] for note in report["notes"]]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _listed(title: str, lines: list[str], none: str) -> list[str]:
    return [f"{title} ({len(lines)}):", *(f"  {line}" for line in lines)] if lines else [none]


def json_report(contents: Contents) -> dict[str, Any]:
    """Return everything of `text_report`, and every tensor, as plain data."""
    common = contents.common
    return {
        "checkpoint": str(contents.folder),
        "iteration": common["iteration"],
        "consumed_samples": common["consumed_samples"],
        "skipped_iterations": common.get("skipped_iterations", 0),
        "model_provider": _provider(contents),
        "frozen": list(common["frozen"]),
        "optimizer_steps": common["optimizer_steps"],
        "grids": common["grids"],
        "lanes": common.get("lanes", 0),
        "rng": {name: list(shape) for name, shape in contents.rng.items()},
        "streams": list(contents.streams),
        "files": dict(contents.files),
        "modules": {module: {"totals": _sums(contents.of(module)),
                             "tensors": [{
                                 "key": tensor.key, "kind": tensor.kind, "name": tensor.name,
                                 "shape": list(tensor.shape), "dtype": tensor.dtype, "parameters": tensor.numel,
                                 "bytes": tensor.num_bytes, "pieces": tensor.num_pieces,
                             } for tensor in contents.of(module)]}
                    for module in contents.modules},
    }


def _provider(contents: Contents) -> str | None:
    name = flat_config(contents.common["config"]).get("model_provider")
    return None if name is None else str(name)


def _progress(contents: Contents) -> list[str]:
    common = contents.common
    lines = [f"iteration {common['iteration']}, {common['consumed_samples']} consumed samples, "
             f"{counted(common.get('skipped_iterations', 0), 'skipped iteration')}",
             f"model provider {_provider(contents) or 'unknown'}, frozen: {', '.join(common['frozen']) or 'nothing'}"]
    steps = common["optimizer_steps"]
    if steps is None:
        lines.append("no optimizer state")
    else:
        counts = [f"{part} {count}" for parts in steps.values() for part, count in parts.items()]
        lines.append(f"optimizer updates: {', '.join(counts) or 'nothing trains'}")
    rng = [f"{name} (pp {pp}, dp {dp}, tp {tp})" for name, (pp, dp, tp) in contents.rng.items()]
    lines.append(f"random generators: {', '.join(rng) or 'none'}")
    lines.append(f"data streams: {', '.join(contents.streams) or 'none'}")
    return lines


def _grids(contents: Contents) -> list[str]:
    grids = {name: sizes for name, sizes in contents.common["grids"].items() if sizes}
    if not grids:
        return ["not saved by a run: weights alone"]
    rows = [["saved on", "ranks", *_AXES]]
    for name, sizes in grids.items():
        count = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
        rows.append([name, span(range(sizes["offset"], sizes["offset"] + count)),
                     *(str(sizes[axis]) for axis in _AXES)])
    return table(rows)


def _tensors(tensors: Sequence[StoredInfo], *, every_tensor: bool) -> list[str]:
    """List a module's weights, with equal layers and experts in one row, or every stored tensor with its key."""
    heads = ["key", "pieces", "shape"] if every_tensor else ["tensor", "count", "shape of one"]
    found: list[tuple[str, int, StoredInfo | Row]] = (
        [(tensor.key, tensor.num_pieces, tensor) for tensor in tensors] if every_tensor else
        [(row.name, row.count, row) for row in rows_of(tensor for tensor in tensors if tensor.kind == WEIGHTS)])
    rows = [[name, str(count), " x ".join(map(str, each.shape)) or "scalar", each.dtype, f"{each.numel:,}",
             f"{each.num_bytes:,}"] for name, count, each in found]
    return table([[*heads, "dtype", "parameters", "bytes"], *rows]) if rows else []


def _sums(tensors: Iterable[StoredInfo]) -> dict[str, dict[str, int]]:
    """Count tensors, elements and bytes of each kind."""
    sums: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        of_kind = sums.setdefault(tensor.kind, {"tensors": 0, "parameters": 0, "bytes": 0})
        of_kind["tensors"] += 1
        of_kind["parameters"] += tensor.numel
        of_kind["bytes"] += tensor.num_bytes
    return sums


def _totals(module: str, tensors: Sequence[StoredInfo]) -> list[str]:
    rows = [[f"{module}, totals", "stored tensors", "parameters", "bytes"]]
    for kind, sums in _sums(tensors).items():
        rows.append([_TITLES.get(kind, kind), str(sums["tensors"]), f"{sums['parameters']:,}",
                     f"{sums['bytes']:,}"])
    return table(rows)


def inspect(flags: InspectFlags, run_flags: list[str]) -> int:
    """Print the report.

    Returns:
        1 if `--verify` found damage, else 0.

    Raises:
        ValueError: there is no checkpoint, or it or a configuration cannot be read.
    """
    folder = checkpoint_folder(flags.checkpoint, flags.ckpt_step, "mimo inspect")
    try:
        contents = read_contents(folder)
    except ValueError as error:
        if not flags.verify:
            raise
        # Without the index and `common.pt` nothing else can be read.
        if flags.json:
            print(json.dumps({"checkpoint": str(folder), "damage": [str(error)]}, indent=2))
        print(f"damaged: {error}", file=sys.stderr)
        return 1
    report: dict[str, Any] = {}
    if flags.config or run_flags:
        refuse_named_code(named_providers(flags.config, run_flags), "--config", run_flags)
        config = parse([*(word for path in flags.config for word in ("--config", path)), *run_flags])
        report["differences"] = {"flags": flag_differences(contents, config),
                                 "tensors": tensor_differences(contents, config)}
    if flags.verify:
        report["damage"], report["notes"] = damage(contents)
    if flags.json:
        print(json.dumps({**json_report(contents), **report}, indent=2))
    else:
        print(text_report(contents, report, every_tensor=flags.tensors))
    return 1 if report.get("damage") else 0
