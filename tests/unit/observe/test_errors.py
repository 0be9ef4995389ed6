from __future__ import annotations

import pytest

PRELUDE = """
import atexit, sys, threading
from mimo.watchdog.process_exit import FailFast
atexit.register(threading.Event().wait)  # stands for a tear-down that hangs
threading.Thread(target=threading.Event().wait).start()  # not a daemon: a normal exit would wait for it
print("last words", end="")
"""


def test_value_error_is_one_short_block(start):
    process = start(PRELUDE + """
with FailFast("rank 3") as guard:
    guard.who = "rank 3 (language grid tp 1)"
    raise ValueError("--llm-tp 3: does not divide --world-size 4")
""")
    out, error = process.communicate()
    assert process.returncode == 1
    assert out == "last words"
    lines = error.splitlines()
    assert lines[0] == ("error on rank 3 (language grid tp 1): ValueError: --llm-tp 3: does not divide --world-size 4")
    assert lines[1].startswith("  raised at ")
    assert len(lines) == 2


@pytest.mark.parametrize(("statement", "headline"), [
    ("1 / 0", "error on rank 0: ZeroDivisionError: division by zero"),
    ("import json; json.loads('{')", "error on rank 0: json.decoder.JSONDecodeError: Expecting property name"),
    ("assert False, 'lanes differ'", "error on rank 0: AssertionError: lanes differ"),
])
def test_any_other_error_has_its_traceback(start, statement, headline):
    process = start(PRELUDE + f"""
with FailFast("rank 0"):
    {statement}
""")
    _, error = process.communicate()
    assert process.returncode == 1
    assert error.startswith(headline)
    assert "Traceback (most recent call last)" in error


def test_interrupt_exits_130(start):
    process = start(PRELUDE + """
with FailFast("rank 0"):
    raise KeyboardInterrupt
""")
    _, error = process.communicate()
    assert (process.returncode, error) == (130, "interrupted: rank 0\n")


@pytest.mark.parametrize(("code", "statement"), [(5, "sys.exit(5)"), (0, "sys.exit(0)"), (0, "pass")])
def test_ordinary_ends_pass_through(start, code, statement):
    process = start(f"""
import sys
from mimo.watchdog.process_exit import FailFast
with FailFast("rank 0"):
    {statement}
""")
    _, error = process.communicate()
    assert (process.returncode, error) == (code, "")


def test_a_full_pipe_that_nobody_reads_does_not_keep_the_process(start):
    process = start("""
import os
from mimo.watchdog import process_exit as errors
errors.WRITE_LIMIT_S = 0.2
with errors.FailFast("rank 0"):
    raise ValueError("x" * 1_000_000)
""")
    assert process.wait() == 1


def test_an_error_of_an_engine_that_quotes_a_lost_connection_is_a_cause_of_its_own():
    import torch.distributed as dist

    from mimo.refit.rendezvous import RefitError
    from mimo.watchdog.process_exit import error_report

    quoted = "the engine's worker failed: [1] Connection closed by peer"
    assert quoted in error_report("rank 0", RefitError(quoted))
    for error in (RuntimeError(quoted), dist.DistBackendError(quoted)):
        assert error_report("rank 1", error) == (
            "rank 1 stops: another rank has ended; its message, if it left one, says why\n")


def test_out_of_memory_names_what_needs_less() -> None:
    from mimo.watchdog.process_exit import error_report

    class OutOfMemoryError(RuntimeError):
        """Stands for torch's, whose name it has."""

    text = error_report("rank 0", OutOfMemoryError("CUDA out of memory"))
    assert text.splitlines()[1].startswith("what needs less memory: --micro-batch-size 1 (train_rl.py")
    assert "what needs less memory" not in error_report("rank 0", RuntimeError("CUDA error"))
