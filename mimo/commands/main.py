"""The command `mimo`: reads the command line, runs one command, turns mistakes into one message."""

from __future__ import annotations

import os
import sys

from mimo.commands.flags import (
    AskFlags,
    ConvertDataFlags,
    ExportFlags,
    Flags,
    InspectFlags,
    PlanFlags,
    check_folders,
    parse_command,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, 1 where `--verify` found damage, 2 for something that cannot be done.
    """
    # A provider named pkg.module:attr may lie in the folder the command was typed in.
    sys.path.append(os.getcwd())
    flags, run_flags = parse_command(sys.argv[1:] if argv is None else argv)
    try:
        return _run(flags, run_flags)
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has seen enough; nothing may be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _run(flags: Flags, run_flags: list[str]) -> int:
    if isinstance(flags, PlanFlags):
        from mimo.commands.plan import plan

        return plan(flags, run_flags)
    if isinstance(flags, ConvertDataFlags):
        from mimo.commands.convert_data import convert_data

        return convert_data(flags)
    check_folders(flags)
    # Imported late: torch and Megatron take seconds, and neither --help nor a mistyped path needs them.
    from mimo.platform import get_platform, quieten_megatron

    quieten_megatron()
    # The other commands need no GPU; and without one to compile for, importing Megatron takes half the time.
    platform = get_platform(flags.device if isinstance(flags, AskFlags) else "cpu")
    if isinstance(flags, AskFlags):
        from mimo.commands.ask import ask

        return ask(flags, run_flags, platform)
    if isinstance(flags, InspectFlags):
        from mimo.commands.inspect import inspect

        return inspect(flags, run_flags)
    if isinstance(flags, ExportFlags):
        from mimo.commands.convert import export

        return export(flags, run_flags)
    from mimo.commands.convert import import_

    return import_(flags, run_flags)
