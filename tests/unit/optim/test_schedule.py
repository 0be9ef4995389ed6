"""Learning-rate schedules against their formulas, by iterations and by samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.spawn import WorkerPool

LR, MIN_LR, BATCH, LENGTH, WARMUP, WSD = 1.0, 0.1, 8, 20, 4, 6


def rates_of(rank: int, cases: list[tuple[str, ...]]) -> list[dict[str, list[float]]]:
    """Return the learning rates of LENGTH iterations for each set of flags: of a parameter group, and as logged."""
    from types import SimpleNamespace

    from mimo.config.cli import parse
    from mimo.training.optimizer import build_scheduler, current_learning_rates

    by_case = []
    for flags in cases:
        config = parse(["--model-provider", "mock", "--lr", str(LR), "--min-lr", str(MIN_LR), "--global-batch-size",
                        str(BATCH), "--encoder-lr", "0.5", *flags])
        optimizer = SimpleNamespace(param_groups=[{"max_lr": LR, "min_lr": MIN_LR}])
        scheduler = build_scheduler(config, optimizer)
        found: dict[str, list[float]] = {"group": [], "language": [], "vision": [], "projector": []}
        for _ in range(LENGTH):
            found["group"].append(optimizer.param_groups[0]["lr"])
            for part, rate in current_learning_rates(config, scheduler, ("vision",)).items():
                found[part].append(rate)
            scheduler.step(BATCH)
        by_case.append(found)
    return by_case


def decayed(shape: Callable[[float], float]) -> list[float]:
    """Warm-up, then `shape` of the share of the decay that has passed."""
    return [
        LR * step / WARMUP if step <= WARMUP else MIN_LR + (LR - MIN_LR) * shape((step - WARMUP) / (LENGTH - WARMUP))
        for step in range(LENGTH)
    ]


def wsd(shape: Callable[[float], float]) -> list[float]:
    """Warm-up, a plateau, then `shape` over the last WSD iterations."""
    start = LENGTH - WSD
    return [
        LR * step / WARMUP
        if step <= WARMUP
        else LR
        if step <= start
        else MIN_LR + (LR - MIN_LR) * shape((step - start) / WSD)
        for step in range(LENGTH)
    ]


STYLES: dict[str, list[float]] = {
    "linear": decayed(lambda share: 1 - share),
    "cosine": decayed(lambda share: (1 + math.cos(math.pi * share)) / 2),
    "inverse-square-root": [
        LR * step / WARMUP if step <= WARMUP else max(MIN_LR, LR * (WARMUP / step) ** 0.5) for step in range(LENGTH)
    ],
    "constant": [LR * step / WARMUP if step <= WARMUP else LR for step in range(LENGTH)],
    "WSD linear": wsd(lambda share: 1 - share),
    "WSD cosine": wsd(lambda share: (1 + math.cos(math.pi * share)) / 2),
    "WSD exponential": wsd(lambda share: 2 * 0.5**share - 1),
    "WSD minus_sqrt": wsd(lambda share: 1 - share**0.5),
}


def flags_of(style: str, unit: str) -> tuple[str, ...]:
    """Flags of a style, in iterations or in samples."""
    scale = BATCH if unit == "samples" else 1
    name, _, shape = style.partition(" ")
    flags = ["--lr-decay-style", name, f"--train-{unit}", str(LENGTH * scale), f"--lr-warmup-{unit}",
             str(WARMUP * scale)]
    if shape:
        flags += [f"--lr-wsd-decay-{unit}", str(WSD * scale), "--lr-wsd-decay-style", shape]
    return tuple(flags)


@pytest.mark.parametrize("unit", ["iters", "samples"])
def test_schedule_follows_its_formula(pool: WorkerPool, unit: str) -> None:
    (by_style,) = pool.run(rates_of, [flags_of(style, unit) for style in STYLES], world_size=1)
    for (style, expected), found in zip(STYLES.items(), by_style, strict=True):
        np.testing.assert_allclose(found["group"], expected, rtol=1e-12, atol=1e-12, err_msg=style)
        assert found["language"] == found["group"], "the log says what the optimizer uses"
        np.testing.assert_allclose(found["vision"], 0.5 * np.array(expected), rtol=1e-12, atol=1e-12, err_msg=style)
        assert found["projector"] == found["vision"], "projectors follow the encoder unless told otherwise"


@pytest.mark.parametrize(("flags", "unused"), [
    ("--encoder-lr 1e-4 --projector-lr 2e-3", []),
    ("--encoder-lr 1e-4 --freeze vision", []),
    ("--encoder-lr 1e-4 --projector-lr 2e-3 --freeze vision", ["--encoder-lr 0.0001"]),
    ("--encoder-lr 1e-4 --freeze vision,projector", ["--encoder-lr 0.0001"]),
    ("--encoder-lr 1e-4 --projector-lr 2e-3 --freeze projector", ["--projector-lr 0.002"]),
    ("--encoder-lr 1e-4 --projector-lr 2e-3 --freeze vision,projector",
     ["--encoder-lr 0.0001", "--projector-lr 0.002"]),
    ("--encoder-weight-decay 0 --freeze vision", []),
    ("--freeze vision,projector", []),
])
def test_learning_rates_that_nothing_trains_with_are_said(monkeypatch: pytest.MonkeyPatch, flags: str,
                                                          unused: list[str]) -> None:
    from types import SimpleNamespace
    from typing import Any

    from mimo.config.cli import parse
    from mimo.registry import model_provider
    from mimo.training import loop, optimizer

    config = parse(["--model-provider", "mock", *flags.split()])
    def flags_of(lines: list[str]) -> list[str]:
        return [line.partition(" is not used: ")[0] for line in lines]

    assert flags_of(optimizer.unused_rates(config, ("vision",))) == unused
    assert flags_of(optimizer.unused_rates(config, ("vision", "audio"))) == [
        flag for flag in unused if flag.startswith("--projector")], "an encoder that trains"
    said = list[str]()
    run: Any = loop.TrainingLoop.__new__(loop.TrainingLoop)
    run.config, run.provider, run.meter = config, model_provider("mock"), None
    run.parts = SimpleNamespace(built=SimpleNamespace(model=None))
    run.grids = SimpleNamespace(layout=SimpleNamespace(kind="disjoint"))
    run.session = SimpleNamespace(resume=lambda *_: [], total_iterations=1,
                                  open_records=lambda: SimpleNamespace(message=said.append))
    for name in ("run_state", "get_model_config", "layout_note"):
        monkeypatch.setattr(loop, name, lambda *_: None)
    run._start(None)
    assert flags_of([line for line in said if "(--freeze " in line]) == unused
