"""A process that compares mathematical expressions with the package math-verify, one request a line on standard input.

SymPy never returns from some inputs, and math-verify's own time limit is a signal, which only reaches the main thread
of a process. Therefore the work is done in this process: its starter may wait on any thread, and kills it if it takes
too long. It imports nothing from this project.

A request is JSON with the texts `wanted` and `found`. The answer is JSON with `known`, whether `wanted` is an
expression, and `equal`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import resource
import sys

# Seconds after which math-verify's signal gives up on an expression, and after which the process ends if that fails.
SIGNAL_S, END_S = 5, 30
MEMORY_BYTES = 8 << 30


def serve() -> None:
    """Answer requests until there are no more."""
    # The starter expects nothing but answers, and ANTLR prints a warning if another version of it is installed.
    answers, sys.stdout = sys.stdout, sys.stderr
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # The process ends by itself in case its starter is gone and does not kill it.
        faulthandler.dump_traceback_later(END_S, exit=True)
        wanted = parse(request["wanted"], parsing_timeout=SIGNAL_S)
        equal = bool(wanted) and verify(wanted, parse(request["found"], parsing_timeout=SIGNAL_S),
                                        timeout_seconds=SIGNAL_S)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"known": bool(wanted), "equal": bool(equal)}), file=answers, flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    serve()
