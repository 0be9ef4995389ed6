"""The planning benchmark on a small model: what all ranks send is what all workers receive."""

from __future__ import annotations

import json

import pytest

from scripts.bench import refit_plan, refit_shapes


def small() -> refit_shapes.Model:
    """Four layers of four experts with grouped-query attention."""
    layers = []
    for layer in range(4):
        at = f"model.layers.{layer}"
        layers += [refit_shapes.alone(f"{at}.norm.weight", (16,), layer),
                   *(refit_shapes.Tensor(f"{at}.{part}_proj.weight", (heads * 4, 16), layer, f"{at}.qkv", 0, None, part)
                     for part, heads in (("q", 8), ("k", 2), ("v", 2))),
                   refit_shapes.alone(f"{at}.e_score_correction_bias", (4,), layer),
                   *(each for expert in range(4)
                     for each in refit_shapes.mlp(f"{at}.experts.{expert}", layer, 16, 32, expert))]
    return refit_shapes.Model(refit_shapes.around(layers, 4, 64, 16), 4, 4, 8, 2, 4)


@pytest.mark.parametrize(("engine", "copies"), [("tp=4,replicas=2", 2), ("tp=2,pp=2,dp=2,ep=1", 1)])
def test_both_sides_come_to_the_same_sum(engine, copies, monkeypatch, capsys):
    monkeypatch.setitem(refit_plan.MODELS, "deepseek-v3", small)
    arguments = ["--model", "deepseek-v3", "--trainer", "tp=4,pp=2,dp=2,ep=4", "--engine", engine, "--planned", "99"]
    assert refit_plan.main(arguments) == 0
    table, *_, last = (lines := capsys.readouterr().out.splitlines())
    (found,) = json.loads(last)["cases"]
    assert "GB a worker receives" in table and len(lines) == 4
    workers, ranks = found["workers"], found["trainer_ranks"]
    assert workers["planned"] == 8 and ranks["planned"] == 16
    assert workers["bytes_total"] == ranks["bytes_total"] and workers["ops_total"] == ranks["ops_total"]
    expert_bytes = 4 * 4 * 3 * 32 * 16 * 2  # of all layers
    assert copies * expert_bytes < workers["bytes_total"] < 2 * copies * expert_bytes


def test_a_proof_compares_every_pair_of_both_sides(monkeypatch, capsys):
    monkeypatch.setitem(refit_plan.MODELS, "deepseek-v3", small)
    arguments = ["--model", "deepseek-v3", "--trainer", "tp=2,pp=2,dp=2,ep=4", "--engine", "tp=4,pp=2", "--prove"]
    assert refit_plan.main(arguments) == 0
    assert "8 workers' plans are complete, and 8 ranks' plans agree with them" in capsys.readouterr().out
    shares, senders = refit_plan.shares, refit_plan.senders
    with monkeypatch.context() as patch:  # every rank forgets what it sends first
        patch.setattr(refit_plan, "shares", lambda *arguments: shares(*arguments)[1:])
        with pytest.raises(RuntimeError, match="8 pairs of trainer rank and worker disagree, such as"):
            refit_plan.main(arguments)
    with monkeypatch.context() as patch:  # every rank sends its last box twice
        patch.setattr(refit_plan, "shares", lambda *arguments: (own := shares(*arguments)) + own[-1:])
        with pytest.raises(RuntimeError, match="pairs of trainer rank and worker disagree, such as"):
            refit_plan.main(arguments)
    with monkeypatch.context() as patch:  # worker 3 expects what worker 2 would get, from other ranks
        patch.setattr(refit_plan, "senders", lambda pieces, worker: senders(pieces, 2 if worker == 3 else worker))
        with pytest.raises(RuntimeError, match=r"pairs of trainer rank and worker disagree, such as \(\d, 3\)"):
            refit_plan.main(arguments)
    with monkeypatch.context() as patch:  # every worker does without its last box
        pieces = refit_plan.needed_pieces
        patch.setattr(refit_plan, "needed_pieces", lambda *arguments: pieces(*arguments)[:-1])
        with pytest.raises(ValueError, match="elements are missing"):
            refit_plan.main(arguments)


def test_rows_of_mamba_are_divided_part_by_part() -> None:
    model = refit_shapes.nemotron_ultra_550b()
    assert 540e9 < sum(each.num_bytes for each in model.entries) / 2 < 600e9
    boxes = [part.box for part in refit_shapes.dense_slices(model, refit_shapes.TrainerLayout(tp=8), 0, 1)
             if part.name == "backbone.layers.0.mixer.in_proj.weight"]
    assert [(box.starts[0], box.stops[0]) for box in boxes] == [
        (2048, 4096), (18432, 20480), (32896, 33024), (33920, 34048), (34848, 34880)]
