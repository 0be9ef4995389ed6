from __future__ import annotations

import math

from mimo.watchdog.status import Schedule
from mimo.watchdog.watchdog import Watchdog

WHO = "rank 3 (language grid tp 1 dp 0 pp 0, lane 0)"
STALL = f"""
import sys, threading, time
from pathlib import Path
from mimo.watchdog.status import Schedule
from mimo.watchdog.watchdog import Watchdog
report = Path(sys.argv[1]) if len(sys.argv) > 1 else None
watchdog = Watchdog(0.5, {WHO!r}, report_path=report)
"""


def test_stall_exits_17_and_says_where(start, tmp_path):
    report = tmp_path / "new" / "stall-rank3.txt"
    process = start(STALL + """
def blocked_in_the_bridge():
    with watchdog.waiting("forward-backward"):
        with watchdog.waiting("bridge recv_forward", peer="vision rank 0", lane=0, tensor=None):
            threading.Event().wait()

with watchdog.waiting("an earlier thing"):
    pass
watchdog.progress(iteration=7)
watchdog.progress()
blocked_in_the_bridge()
""", report)
    _, error = process.communicate()
    assert process.returncode == 17
    first = error.splitlines()[0]
    assert first.startswith(f"stall on {WHO}: no progress for ")
    assert ", iteration 7; waiting for bridge recv_forward (peer vision rank 0, lane 0) for " in first
    assert "; inside forward-backward for " in first
    assert "earlier" not in first
    assert "thread MainThread" in error
    assert "in blocked_in_the_bridge" in error
    assert report.read_text() == error


def test_the_longest_time_without_progress_leaves_out_phases_with_a_limit_of_their_own(monkeypatch):
    now = 100.0
    monkeypatch.setattr("mimo.watchdog.watchdog.time.monotonic", lambda: now)
    watchdog = Watchdog(0, WHO)
    steps = [(3, lambda: watchdog.progress(iteration=1)), (1, watchdog.progress)]
    for seconds, tell in steps:
        now += seconds
        tell()
    assert watchdog.longest_s == 3
    with watchdog.waiting("the bridge"):
        now += 4
    assert watchdog.longest_s == 4
    now += 5
    with watchdog.limit(600), watchdog.waiting("checkpoint"):
        now += 300
        watchdog.progress()
        now += 300
    assert (watchdog.longest_s, watchdog.last_change) == (5, now)
    now += 90
    watchdog.forget_longest()
    now += 2
    with watchdog.waiting("data"):
        pass
    assert watchdog.longest_s == 2, "what was before does not count, nor does the time up to there"


def test_stall_outside_every_wait(start):
    process = start(STALL + "time.sleep(600)")
    _, error = process.communicate()
    assert process.returncode == 17
    assert "; not in a tracked wait" in error.splitlines()[0]


def test_report_that_cannot_be_written_still_reaches_stderr(start, tmp_path):
    (tmp_path / "file").write_text("in the way")
    process = start(STALL + "time.sleep(600)", tmp_path / "file" / "stall-rank3.txt")
    _, error = process.communicate()
    assert process.returncode == 17
    assert error.startswith(f"stall on {WHO}")
    assert "(no copy in " in error


CONCLUDES = """
import sys, threading, time
from mimo.watchdog.status import RankProcess
from mimo.watchdog.status import Schedule
from mimo.watchdog.watchdog import Watchdog

class Conclusion:
    holder = "the launcher"
    def start(self, on_stall):
        self.on_stall = on_stall
    def conclude(self, status):
        print(status.rank, [wait.what for wait in status.waits], status.waits[0].peers, flush=True)
        print(status.stack[0], flush=True)
        return CONCLUDED
    def close(self, *, failed):
        print("closed", failed, flush=True)

conclusion = Conclusion()
"""


def test_the_status_goes_to_the_summary_of_all_ranks(start):
    process = start(CONCLUDES.replace("CONCLUDED", "()") + """
watchdog = Watchdog(0.5, "rank 3", rank=3, conclusion=conclusion)
watchdog.on_stall.append(lambda: print("at stall", flush=True))
with watchdog.waiting("outer"), watchdog.waiting("bridge recv_forward", peers=lambda: [0, 2], module="vision"):
    time.sleep(600)
""")
    out, error = process.communicate()
    assert process.returncode == 17
    status, stack, last = out.splitlines()
    assert status == "3 ['bridge recv_forward', 'outer'] (0, 2)"
    assert "<module>" in stack
    assert last == "at stall", "after the summary"
    assert "; waiting for bridge recv_forward (module vision, peers 0, 2) for " in error
    assert "summary" not in error, "the conclusion's business"


def test_a_stall_of_another_rank_ends_this_one_whatever_its_limit(start):
    process = start(CONCLUDES.replace("CONCLUDED", "None") + """
watchdog = Watchdog(600, "rank 3", rank=3, conclusion=conclusion)
threading.Timer(0.3, lambda: conclusion.on_stall()).start()
with watchdog.limit(float("inf")), watchdog.waiting("checkpoint"):
    time.sleep(600)
""")
    out, error = process.communicate(timeout=60)
    assert process.returncode == 17
    assert out.startswith("3 ['checkpoint'] ()\n")
    assert error.startswith("stall elsewhere, seen on rank 3: no progress for ")
    assert "rank 3 got no summary of the stall: no answer from the launcher" in error, "it said None"


def test_closing_ends_the_conversation_with_other_ranks(start):
    process = start(CONCLUDES + """
watchdog = Watchdog(600, "rank 3", conclusion=conclusion)
watchdog.close(failed=True)
watchdog.close()
""")
    assert process.communicate()[0] == "closed True\n"


def test_an_action_that_keeps_the_interpreters_lock_does_not_keep_the_process(start):
    process = start(STALL + """
import ctypes
from mimo.watchdog import watchdog as module
module.LEAVE_S = 2.0

def keeps_the_lock():
    ctypes.PyDLL(None).sleep(600)

watchdog.on_stall.append(keeps_the_lock)
time.sleep(600)
""")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1, "faulthandler's"
    assert "in keeps_the_lock" in error


def test_progress_a_longer_limit_and_close_keep_the_process(start):
    process = start(STALL.replace("0.5", "1.5") + """
longer, endless, closed, idle = (Watchdog(limit, "rank 0") for limit in (1.5, 1.5, 1.5, 0))
closed.close()
closed.close()
with longer.limit(600), longer.limit(0.1), endless.limit(float("inf")):
    for step in range(15):
        time.sleep(0.2)
        watchdog.progress(iteration=step)
for each in (watchdog, longer, endless, idle):
    each.close()
print("done")
""")
    out, error = process.communicate()
    assert (process.returncode, out, error) == (0, "done\n", "")


def test_limit_ends_with_its_block(start):
    process = start(STALL + """
with watchdog.limit(600):
    time.sleep(1)
print("after", flush=True)
time.sleep(600)
""")
    out, _ = process.communicate()
    assert (process.returncode, out) == (17, "after\n")


def test_a_stuck_interpreter_lock_still_ends_the_process(start):
    process = start("""
import ctypes
from mimo.watchdog import watchdog as module
module.LOCK_SLACK_S = 0.5
watchdog = module.Watchdog(0.5, "rank 0")

def holds_the_lock():
    ctypes.PyDLL(None).sleep(600)  # PyDLL, unlike CDLL, keeps the lock during the call

holds_the_lock()
""")
    _, error = process.communicate()
    assert process.returncode == 1
    assert "holds_the_lock" in error


def test_state_without_a_thread():
    watchdog = Watchdog(0, "rank 0")
    watchdog.progress(iteration=1)
    with watchdog.waiting("optimizer step"):
        assert "iteration 1; waiting for optimizer step for " in watchdog.describe()
    assert watchdog.describe().endswith("; not in a tracked wait")
    watchdog.close()


def test_passes_of_the_iteration_before_are_not_told():
    """While a rank waits for data its last passes are those of the iteration before."""
    watchdog, passes = Watchdog(0, "rank 0"), Schedule(1, 4, 4, 4)
    watchdog.schedule = lambda: passes
    assert "all 4 microbatches" in watchdog.describe()
    watchdog.progress(iteration=2)
    assert watchdog.describe().startswith("rank 0: no progress for") and "microbatches" not in watchdog.describe()
    assert watchdog.status().where() == "iteration 2"
    assert watchdog.status().schedule == Schedule(1, 4, 4, 4, is_over=True)
    passes = Schedule(2, 4, 1, 0)
    watchdog.progress()
    assert watchdog.status().where() == "iteration 2, microbatch 1 of 4 (forward 1, backward 0 done)"
    watchdog.progress(iteration=2)
    assert watchdog.status().schedule == passes
    watchdog.close()


def test_wait_ends_when_its_body_fails():
    watchdog = Watchdog(0, "rank 0")
    try:
        with watchdog.waiting("optimizer step"):
            raise RuntimeError("lost")
    except RuntimeError:
        pass
    assert watchdog.current_wait is None


def test_time_left_is_never_shortened_by_a_phase():
    watchdog = Watchdog(0, "rank 0")
    with watchdog.limit(1000.0):
        assert 900 < watchdog.time_left(10.0) <= 1000
        with watchdog.limit(5.0):
            assert 900 < watchdog.time_left(10.0) <= 1000
        with watchdog.limit(math.inf):
            assert watchdog.time_left(10.0) == math.inf
        assert 1900 < watchdog.time_left(2000.0) <= 2000
    assert watchdog.time_left(10.0) <= 10
