"""A process that compares mathematical expressions by the package math-verify; a request a line on standard input.

SymPy does not come back from some inputs, and math-verify's own limit is a signal, which only reaches the main thread
of a process. So its work is done here: whoever waits for an answer may be on any thread, and kills this process when it
takes too long. This imports nothing of this project.

A request is JSON with `wanted` and `found`, texts. The answer says whether `wanted` is an expression, and whether they
are equal.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import resource
import sys

# Seconds for each expression, by math-verify's signal; then, if that does not help, for the process.
SIGNAL_S, END_S = 5, 30
MEMORY_BYTES = 8 << 30


def serve() -> None:
    """Answer requests until there are no more."""
    # The starter reads answers alone; ANTLR prints where another package has installed another version of it.
    answers, sys.stdout = sys.stdout, sys.stderr
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # A starter that has gone kills nobody.
        faulthandler.dump_traceback_later(END_S, exit=True)
        wanted = parse(request["wanted"], parsing_timeout=SIGNAL_S)
        equal = bool(wanted) and verify(wanted, parse(request["found"], parsing_timeout=SIGNAL_S),
                                        timeout_seconds=SIGNAL_S)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"known": bool(wanted), "equal": bool(equal)}), file=answers, flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    serve()
