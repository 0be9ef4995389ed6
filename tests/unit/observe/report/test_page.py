"""The page: sound HTML that needs nothing else, answers with the run's own figures, nothing where there is nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.observability.trackers import Answer, Generation
from mimo.report.answers import did_it_learn, how_fast, who_waited
from mimo.report.page import page
from mimo.report.run_reader import Run, read_run
from mimo.report.summary import ideal_s, learning, module_times, rl_parts, speed, steady, stops
from tests.support.report_runs import (
    contents,
    evaluation,
    figures,
    headings,
    policy_record,
    rewarded_run,
    run_of,
    step_record,
    timeline,
    usual_records,
    write_generations,
    write_run,
    write_stall,
)


def test_the_page_of_a_run_has_every_section_once(usual: Run) -> None:
    html = page([usual])
    assert html.endswith("</html>\n") and len(html.encode()) < 6_000_000
    assert headings(html) == ["Did it learn?", "How fast was it?", "Which grid waited for which?", "What to try next",
                              "Learning", "One step, all ranks", "Where each grid's time went", "Speed",
                              "Waits and stops", "Memory", "About the run"]
    assert len(contents(html)) < 200_000
    assert "prefers-color-scheme: dark" in html
    assert 'class="warn"' not in html


def test_answers_have_the_figures_of_the_metrics(usual: Run) -> None:
    learnt, fast, waited = did_it_learn(usual), how_fast(usual), who_waited(usual)
    assert learnt.words == "Yes: loss 2.96 to 2.06"
    assert "loss 2.1 (at first 2.6), exact match 95.4 % (at first 50.0 %)" in learnt.sentences
    assert fast.words == "1 s an iteration"
    assert fast.sentences.startswith("2,000 tokens/s per GPU, 300 model TFLOP/s per GPU and MFU 30 %. ")
    assert "last 40 of 50 iterations. The time between iterations does not count." in fast.sentences
    assert waited.words == "vision waited for language, 60 % of its step"
    assert "It spent 0.6 s of its mean step of 1 s at the bridge between the grids (the language grid 7.0 %)." in (
        waited.sentences)
    assert "The slower grid is language: its passes alone take 0.8 s, 80 % of a mean step" in waited.sentences
    html = page([usual])
    for answer in (learnt, fast, waited):
        assert f"<b>{answer.words}</b><p>{answer.sentences}</p>" in html


def test_parts_of_a_grid_sum_to_its_step(usual: Run) -> None:
    times = module_times(usual)
    assert list(times) == ["vision", "language"]
    for each in times.values():
        assert sum(each.parts.values()) == pytest.approx(each.step_s)
    assert ideal_s(times) == pytest.approx(0.8)


def test_slow_iterations_at_the_begin_and_stalls_do_not_count(tmp_path: Path) -> None:
    records = [step_record(step, 1.0, seconds=100.0 if step in (1, 2, 60) else 1.0) for step in range(1, 101)]
    run = run_of(tmp_path, records)
    found = speed(run)
    assert found is not None and found.iteration_s == 1.0
    assert module_times(run)["vision"].step_s == 1.0
    html = page([run])
    assert "Slowest iterations (the median takes 1 s)" in html
    assert re.search(r"<td>60</td><td class=\"num\">100 s</td><td class=\"num\">100.0</td>", html)
    assert "vision: waiting at the bridge, 59.4 s more" in html


@pytest.mark.parametrize(("losses", "words"), [
    ([3.0 - 0.01 * step for step in range(100)], "Yes"),
    ([2.0 + 0.1 * (-1) ** step for step in range(100)], "Not clearly"),
    ([2.0 + 0.02 * step for step in range(100)], "No"),
    ([2.0], "Too early to say"),
    ([math.nan, math.nan], "Not known"),
    ([3.0 - 0.01 * step for step in range(80)] + [math.nan] * 20, "No: the loss is not finite"),
])
def test_whether_it_learned(tmp_path: Path, losses: list[float], words: str) -> None:
    records = [step_record(step, "NaN" if math.isnan(loss) else loss) for step, loss in enumerate(losses, 1)]
    assert did_it_learn(run_of(tmp_path, records)).words.startswith(words)


def test_a_held_out_loss_that_rose_again_is_told(tmp_path: Path) -> None:
    records = [*usual_records(), evaluation(51, 3.0, 0.4)]
    assert "It was better before: 2.1 at iteration 50" in did_it_learn(run_of(tmp_path, records)).sentences


def test_waits_below_a_twentieth_are_none(tmp_path: Path) -> None:
    def even(iteration: int) -> dict[str, Any]:
        record = step_record(iteration, 1.0)
        for module in ("vision", "language"):
            record[f"timeline/{module}/forward-s"] += record[f"timeline/{module}/bridge-wait-s"]
            record[f"timeline/{module}/bridge-wait-s"] = 0.0
        return record

    answer = who_waited(run_of(tmp_path, [even(step) for step in range(1, 20)]))
    assert answer.words == "Neither"


def prefetching(folder: Path, prefetch_s: float, forward_s: float, *, scale: float = 1.0) -> Run:
    """Return a run whose encoder computes ahead, with this forward part of its slowest rank, taken from its waits."""
    def record(iteration: int) -> dict[str, Any]:
        found = step_record(iteration, 1.0, **{"encoder-prefetch-s": prefetch_s})
        for part, least in (("forward", forward_s), ("bridge-wait", 0.7 - forward_s)):
            found[f"timeline/vision/{part}-s"] = found[f"timeline/vision/{part}-max-s"] = least
        for part in ("forward", "backward"):
            found[f"timeline/language/{part}-s"] *= scale
        return found

    return run_of(folder, [record(step) for step in range(1, 31)])


def has_ideal(html: str) -> bool:
    """Whether the bars of a step are compared with the ideal."""
    return "shapes" in figures(html)["Mean step of a rank of each grid"]["layout"]


OPEN = ("Encoder prefetch runs up to 0.7 s of passes a step on a stream of its own, which the timeline does not show: "
        "so it cannot be told which grid is the slower one.")
LANGUAGE = "The slower grid is language: its passes alone take 0.8 s"


@pytest.mark.parametrize(("prefetch_s", "forward_s", "ideal", "said"), [
    (0.5, 0.5, 0.8, [LANGUAGE]),  # inside the forward part
    (0.7, 0.1, None, [OPEN]),  # 0.25 s of the encoder's passes are seen, 0.7 s are not; language 0.8 s
    # 0.25 s and 0.5 s are less.
    (0.5, 0.1, 0.8, [LANGUAGE, "on a stream of its own, which the timeline does not show."]),
])
def test_prefetch_beside_the_timeline_may_leave_the_slower_grid_open(tmp_path, prefetch_s, forward_s, ideal, said):
    run = prefetching(tmp_path, prefetch_s, forward_s)
    assert ideal_s(module_times(run)) == (ideal and pytest.approx(ideal))
    sentences, html = who_waited(run).sentences, page([run])
    assert all(each in sentences for each in said) and ("The slower grid is" in sentences) == (ideal is not None)
    headings(html)
    assert has_ideal(html) == (ideal is not None)
    assert ("does not show" in contents(html)) == (said != [LANGUAGE])
    # Beside the bars, too.
    assert ideal is not None or html.count("which the timeline does not show") == 2 and "The ideal is" not in html


def test_how_long_a_slower_encoder_with_prefetch_takes_is_not_known(tmp_path: Path) -> None:
    assert ideal_s(module_times(prefetching(tmp_path, 0.5, 0.4, scale=0.25))) is None


def test_grids_that_share_ranks_wait_for_none(tmp_path: Path) -> None:
    def shared(iteration: int) -> dict[str, Any]:
        return step_record(iteration, 1.0) | {f"timeline/{module}/other-modules-s": 0.0
                                              for module in ("vision", "language")}

    run = run_of(tmp_path, [shared(step) for step in range(1, 20)], layout="colocated")
    assert who_waited(run).words == "None: they share their ranks"
    assert "25 % passes of vision and 80 % passes of language" in who_waited(run).sentences
    assert "60 % waiting at the bridge" in who_waited(run).sentences
    assert ideal_s(module_times(run)) == pytest.approx(1.05), "one after the other"
    assert "the passes of all modules and nothing else" in page([run])


def test_without_a_timeline_its_sections_are_left_out(tmp_path: Path) -> None:
    records = [{key: value for key, value in record.items() if not key.startswith("timeline/")}
               for record in usual_records()]
    html = page([run_of(tmp_path, records)])
    found = headings(html)
    assert "One step, all ranks" not in found
    assert "The run has no timeline" in html and "there is no timeline/step-N.json" in html


def test_a_run_of_one_figure_has_no_empty_chart(tmp_path: Path) -> None:
    html = page([run_of(tmp_path, [{"iteration": 1, "iteration-time": 0.5, "lm loss": 2.0}])])
    assert headings(html) == ["Did it learn?", "How fast was it?", "Which grid waited for which?", "Learning", "Speed",
                              "About the run"]
    assert list(figures(html)) == ["Loss (nats per target token)", "Time of an iteration (s)"]
    assert figures(html)["Time of an iteration (s)"]["layout"]["xaxis"]["dtick"] == 1


def test_a_dead_run_says_what_is_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path, usual_records(20), planned=500)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 21, "lm lo')
    write_stall(folder, "stall-summary.txt", "all wait for rank 2 <vision>", after_s=700)
    html = page([read_run(folder)])
    headings(html)
    assert "The figures end at iteration 20 of 500" in html and "cannot be read" in html
    assert "all wait for rank 2 &lt;vision&gt;" in html


def test_a_run_without_an_iteration(tmp_path: Path) -> None:
    html = page([run_of(tmp_path, [])])
    assert headings(html)[:3] == ["Did it learn?", "How fast was it?", "Which grid waited for which?"]
    assert "No iteration was finished" in html and figures(html) == {}


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    records = [step_record(step, 1.0, **{"learning-rate/<script>": 1e-3, "peak-memory-bytes/<i>": 1.0})
               for step in (1, 2)]
    html = page([run_of(tmp_path / "<run>", records)])
    headings(html)
    assert "<i>" not in contents(html) and "&lt;run&gt;" in html


def test_reinforcement_learning(tmp_path: Path) -> None:
    records = [policy_record(step, 0.2 + 0.01 * step) for step in range(1, 51)]
    records.insert(0, {"iteration": 0, "consumed_samples": 0, "wall_time": 1.0, "reward validation": 0.1})
    run = run_of(tmp_path, [*records, {"iteration": 50, "wall_time": 2.0, "reward validation": 0.9}])
    assert learning(run).key == "reward"
    assert did_it_learn(run).words == "Yes: reward 0.23 to 0.68"
    assert "reward 0.9 (at first 0.1)" in did_it_learn(run).sentences
    parts, total, waited = rl_parts(run)
    assert parts == pytest.approx({"refit": 0.2, "rollout": 0.6, "reward": 0.1, "other waits for completions": 0.1,
                                   "log-probs": 0.3, "update": 0.6, "rest": 0.1})
    assert (total, waited) == (2.0, 1.0) and sum(parts.values()) == pytest.approx(total)
    assert who_waited(run).words == "For completions, 50 % of an iteration"
    html = page([run])
    assert "Reinforcement learning" in headings(html)
    assert "What did the trainer wait for?" in html
    cells = ["50", "0.2 s", "0.2 s", "1 MiB", "5 MiB/s"]
    assert "".join(f'<td class="num">{cell}</td>' for cell in cells) in html


def test_completions_with_images_rewards_and_advantages(tmp_path: Path) -> None:
    html = page([rewarded_run(tmp_path)])
    assert "Completions" in headings(html) and "completions: there is no" not in html
    titles = re.findall(r"<summary>([^<]*)</summary>", html)
    recorded = [f"Training, iteration {step}: completions of 1 prompt, their mean reward 0.5"
                for step in (1, 8, 16, 24, 32, 40)]
    assert titles == ["Held-out prompts", *recorded, "All flags"]
    assert html.count('<details class="wide" open>') == 3, "held-out prompts, the first and the last iteration"
    held_out = html[html.index("<h3>valid/0</h3>"):html.index("Training, iteration")]
    assert held_out.count("What is the number?") == 1 and "Expected: " in held_out
    assert re.findall(r'<td>(\d+)</td><td><span class="said">I read\n[\d.]+ &lt;end&gt;</span></td>'
                      r'<td class="num">([\d.]+)</td>', held_out) == [("0", "0"), ("20", "0.5"), ("40", "1")]
    assert html.count("<img src=") == 7 and html.count('class="num">0.5</td>') == 6 * 8 + 1
    assert html.count("4 more completions are not shown") == 6


def test_answers_to_held_out_samples(tmp_path: Path) -> None:
    folder = write_run(tmp_path, usual_records())
    grey = np.zeros((8, 8, 3), np.uint8)
    write_generations(folder, "held-out", {50: [Generation("a", [Answer("12")], "12", images=[grey] * 6),
                                                Generation("b<i>", [Answer("\ud800 caf\u00e9")], "14")]})
    with (folder / "generations.jsonl").open("a") as file:
        file.write('{"iteration": 50, "kind": "held-out", "key": "c", "images": ["http://there"]}\n{"iter')
    run = read_run(folder)
    assert run.problems == ("2 lines of generations.jsonl cannot be read and are left out.",)
    html = page([run])
    assert "Answers" in headings(html)
    assert "Held-out samples: 1 of 2 answers are as expected" in html and "and 2 more images" in html
    assert '<p>Answer: <span class="said">12</span></p>' in html
    assert '<span class="said">&#55296; caf&#233;</span> <em class="cut">not the expected one</em></p>' in html


def test_images_beyond_the_size_of_a_page_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = rewarded_run(tmp_path)
    size = len(run.generations[0]["images"][0])
    monkeypatch.setattr("mimo.report.generations.MAX_IMAGE_BYTES", 2 * size)
    html = page([run])
    assert html.count("<img src=") == 2 and html.count("<span>1 image, not shown</span>") == 5
    headings(html)


def test_rollouts_beside_the_update_count_as_far_as_they_were_waited_for(tmp_path: Path) -> None:
    run = run_of(tmp_path, [policy_record(step, 0.5, **{"rollout-wait-s": 0.4}) for step in range(1, 20)])
    parts, total, _ = rl_parts(run)
    assert parts == pytest.approx({"other waits for completions": 0.4, "log-probs": 0.3, "update": 0.6, "rest": 0.7})
    assert sum(parts.values()) == pytest.approx(total)


def test_time_between_iterations(tmp_path: Path) -> None:
    records = usual_records()
    records[10]["checkpoint-s"] = 0.4
    found = stops(run_of(tmp_path, records))
    assert found is not None
    assert found.seconds.tolist() == pytest.approx([0.5] * 49)
    assert found.after[found.checkpoint_s > 0].tolist() == [10]
    assert found.after[found.evaluation_s > 0].tolist() == [25]
    html = page([read_run(tmp_path)])
    assert re.search(r"<td>evaluations</td><td class=\"num\">0.3 s</td>", html)
    assert re.search(r"<td>checkpoints</td><td class=\"num\">0.4 s</td>", html)


def test_the_pause_before_a_resumed_run_is_no_evaluation(tmp_path: Path) -> None:
    records = usual_records()
    for record in records[26:]:
        record["wall_time"] += 8 * 3600.0
    found = stops(run_of(tmp_path, records))
    assert found is not None and found.seconds.max() > 8 * 3600
    assert found.evaluation_s.max() == pytest.approx(0.3)


@pytest.mark.parametrize(("losses", "change"), [
    ([3.2], 0), ([3.2, 2.0], 0), ([3.2, 3.5, 3.1, 3.4, 3.3, 3.2], 0), ([3.0, 2.9, 2.8, 1.2, 1.1, 1.0], 1)])
def test_few_iterations_say_little(tmp_path: Path, losses: list[float], change: int) -> None:
    found = learning(run_of(tmp_path, [step_record(number, loss) for number, loss in enumerate(losses, 1)]))
    assert found is not None and found.change == change


def test_the_first_iteration_of_few_counts_in_no_speed(tmp_path: Path) -> None:
    run = run_of(tmp_path, [step_record(number, 3.0) for number in (1, 2, 3)])
    assert steady(run.steps).iterations.tolist() == [2, 3]


def test_uneven_lanes(tmp_path: Path) -> None:
    def record(iteration: int, least: float, imbalance: float) -> dict[str, Any]:
        lanes = {"timeline/image-tokens-per-lane/min": least, "timeline/image-tokens-per-lane/max": 100.0}
        return step_record(iteration, 1.0, **lanes, **{"encoder-imbalance": imbalance})

    even = page([run_of(tmp_path / "even", [record(step, 100.0, 1.0) for step in (1, 2, 3)])])
    assert "Lanes" not in headings(even)
    uneven = page([run_of(tmp_path / "uneven", [record(step, 60.0, 1.25) for step in (1, 2, 3)])])
    assert "Lanes" in headings(uneven)
    assert "Encoder imbalance" in uneven and "fullest lane" in uneven and "Text tokens of a lane" not in uneven


def test_a_slow_iteration_of_reinforcement_learning_names_its_part(tmp_path: Path) -> None:
    records = [policy_record(step, 0.5) for step in range(1, 31)]
    records[20] |= {"iteration-time": 9.0, "rollout-s": 7.6}
    html = page([run_of(tmp_path, records)])
    assert re.search(r"<td>21</td>.*?<td class=\"num\">rollout, 7 s more</td>", html)


def test_times_of_an_unknown_device_are_per_rank(tmp_path: Path) -> None:
    for device, unit in (("auto", "rank"), ("cpu", "process"), ("cuda", "GPU")):
        run = run_of(tmp_path, usual_records(), device=device)
        assert f"2,000 tokens/s per {unit}," in how_fast(run).sentences


def test_records_without_clocks(tmp_path: Path) -> None:
    records = [step_record(step, 1.0) | {"wall_time": None, "iteration-time": None} for step in (1, 2, 3)]
    html = page([run_of(tmp_path, records)])
    assert "No iteration has a time." in html
    headings(html)


def test_steps_to_choose_from(tmp_path: Path) -> None:
    steps = tuple(timeline(step, {"vision": 1, "language": 1}) for step in (10, 20, 30))
    html = page([run_of(tmp_path, usual_records(), timelines=steps)])
    headings(html)
    assert html.count("<option") == 3
    assert re.findall(r'<div data-step="(\d+)"( hidden)?>', html) == [("10", ""), ("20", " hidden"), ("30", " hidden")]


def test_the_start_by_phase(tmp_path: Path) -> None:
    folder = write_run(tmp_path, usual_records())
    (folder / "startup.json").write_text(json.dumps({"seconds": 10.0, "phases": {"imports": 7.5, "model": 2.5}}))
    html = page([read_run(folder)])
    headings(html)
    assert "end of the first iteration: 10 s" in html
    assert '<td>imports</td><td class="num">7.5 s</td><td class="num">75 %</td>' in html


def test_long_runs_of_large_grids_stay_small(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [], timelines=tuple(timeline(step, {"vision": 64, "language": 128}, microbatches=64)
                                                     for step in (10, 20, 30)))
    record = step_record(1, 2.0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 5001):
            file.write(json.dumps(record | {"iteration": step, "lm loss": 2.0 + math.sin(step)}) + "\n")
    html = page([read_run(folder), read_run(folder)])
    headings(html)
    assert len(contents(html)) < 1_500_000
