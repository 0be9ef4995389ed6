"""Phases of a start: without gap or overlap on a rank, and over ranks they end when the last one ends them."""

from __future__ import annotations

import json
import re
import time

import psutil
import pytest

from mimo.observability.startup import Phase, RankStart, Startup, process_age_s, report_of

PHASES = (Phase.IMPORTS.value, Phase.GROUPS.value, Phase.IMPORTS.value, Phase.UPDATE.value)


def ranks() -> list[RankStart]:
    """The second rank imports for longer; the first one waits for it where both meet."""
    return [RankStart(PHASES, (2.0, 5.5, 6.0, 9.0), ("0", "1")),
            RankStart(PHASES, (5.0, 5.25, 6.5, 8.75), ("0", "2", "3"))]


def test_the_phases_of_a_run_end_with_the_last_rank_and_sum_to_the_whole():
    report = report_of(ranks(), 100.0)
    assert report is not None
    assert report.phases == {"imports": 5.0 + 1.0, "process groups": 0.5, "update": 2.5}
    assert sum(report.phases.values()) == report.seconds == 9.0
    assert [rank["imports"] for rank in report.ranks] == [2.0 + 0.5, 5.0 + 1.25]
    assert [sum(rank.values()) for rank in report.ranks] == [9.0, 8.75]
    assert (report.num_groups, report.num_groups_of_a_rank, report.ended_unix_s) == (4, 3, 100.0)


def test_the_line_leaves_out_what_takes_no_time():
    phases = (Phase.IMPORTS.value, Phase.LOAD.value, Phase.UPDATE.value)
    report = report_of([RankStart(phases, (12.25, 12.26, 13.0), ())], 0.0)
    assert report is not None and report.line() == "first iteration after 13.0 s: imports 12.2, update 0.7"


def test_a_report_can_be_read_back(tmp_path):
    report = report_of(ranks(), 100.0)
    assert report is not None
    report.write(tmp_path / "startup.json")
    found = json.loads((tmp_path / "startup.json").read_text())
    assert found["phases"] == report.phases and found["ranks"] == report.ranks and found["seconds"] == 9.0


def test_ranks_without_a_start_have_no_report():
    first, second = ranks()
    assert report_of([first, None], 0.0) is None and report_of([None, second], 0.0) is None


def test_a_start_says_what_it_does(caplog):
    startup = Startup()
    startup.say("closed, so not said")
    startup.open()
    with caplog.at_level("INFO", "mimo"):
        for phase in (Phase.GROUPS, Phase.DATA, Phase.MODEL, Phase.IMPORTS, Phase.DATA, Phase.MODEL):
            startup.enter(phase)
        startup.say("starting vLLM")
    said = [re.fullmatch(r"\[ *\d+\.\d s\] (.+)", message) for message in caplog.messages]
    assert [match and match[1] for match in said] == [
        "connecting the ranks and creating process groups", "opening the data", "building the model",
        "waiting for the first batch", "starting vLLM"]


def test_moments_are_kept_between_open_and_close():
    startup = Startup()
    startup.enter(Phase.MODEL)
    assert startup.close([]) is None
    startup.open()
    for phase in (Phase.GROUPS, Phase.GROUPS, Phase.IMPORTS):
        startup.enter(phase)
    start = startup.close(["0"])
    assert start is not None and start.phases == ("imports", "process groups", "imports")
    assert list(start.ends_s) == sorted(start.ends_s) and len(start.ends_s) == 3
    assert sum(start.seconds.values()) == pytest.approx(start.ends_s[-1])
    startup.enter(Phase.DATA)
    assert startup.close([]) is None


def test_a_process_knows_its_age():
    assert process_age_s() == pytest.approx(time.time() - psutil.Process().create_time(), abs=1.0)


def test_a_disk_that_fails_is_said(tmp_path, caplog):
    report = report_of(ranks(), 100.0)
    assert report is not None
    report.write(tmp_path / "gone" / "startup.json")
    assert "gone/startup.json: cannot be written: [Errno 2] No such file or directory" in caplog.text
