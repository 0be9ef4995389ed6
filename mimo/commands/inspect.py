"""`mimo inspect`: what a checkpoint holds, whether it is whole, and what differs from a run's configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mimo.commands.compare import flag_differences, tensor_differences
from mimo.commands.contents import Contents, read_contents
from mimo.commands.flags import InspectFlags
from mimo.commands.folders import checkpoint_folder
from mimo.commands.model import named_providers, refuse_named_code
from mimo.commands.report import json_report, text_report
from mimo.commands.verify import damage
from mimo.config.cli import parse


def inspect(flags: InspectFlags, run_flags: list[str]) -> int:
    """Print the report.

    Returns:
        1 where `--verify` found damage, else 0.

    Raises:
        ValueError: no checkpoint, or one that cannot be read; a configuration that cannot be read.
    """
    folder = checkpoint_folder(flags.checkpoint, flags.ckpt_step, "mimo inspect")
    try:
        contents = read_contents(folder)
    except ValueError as error:
        if not flags.verify:
            raise
        return _unreadable(folder, error, as_json=flags.json)
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
        print(_text(contents, report, every_tensor=flags.tensors))
    return 1 if report.get("damage") else 0


def _unreadable(folder: Path, error: ValueError, *, as_json: bool) -> int:
    """Index or `common.pt` are damaged themselves: there is nothing else to tell."""
    if as_json:
        print(json.dumps({"checkpoint": str(folder), "damage": [str(error)]}, indent=2))
    print(f"damaged: {error}", file=sys.stderr)
    return 1


def _text(contents: Contents, report: dict[str, Any], *, every_tensor: bool) -> str:
    parts = [text_report(contents, every_tensor=every_tensor)]
    if "differences" in report:
        flags, tensors = report["differences"]["flags"], report["differences"]["tensors"]
        parts.append(_listed("flags that differ", flags, "no flag differs"))
        parts.append(_listed("tensors that differ", tensors, "no tensor differs"))
    if "damage" in report:
        parts.append(_listed("DAMAGED", report["damage"], "verified: every item is what was saved"
                             if not report["notes"] else "nothing damaged was found"))
        parts += [f"note: {note}" for note in report["notes"]]
    return "\n\n".join(parts)


def _listed(title: str, lines: list[str], none: str) -> str:
    return "\n".join([f"{title} ({len(lines)}):", *(f"  {line}" for line in lines)]) if lines else none
