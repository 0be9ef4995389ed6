"""Activations that ranks keep at each moment of an iteration, and the layers of an encoder that they recompute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mimo.config.cli import parse
from mimo.config.validate import validate
from mimo.grid.windows import WindowSchedule
from mimo.planner.activations import (
    ENCODE,
    FINISH,
    GRAPH_BUFFERS,
    LAYER_GRADIENTS,
    Windows,
    image_bytes,
    order_of_work,
)
from mimo.planner.costs import GIB, Costs, Profile, Ratios
from mimo.planner.gpus import GPUS
from mimo.planner.predict import Step
from mimo.planner.simulation import BACKWARD, FORWARD
from mimo.planner.workload import Microbatches, SampleSize
from scripts.bench import presets

PP2 = "--layout colocated --encoder-dp 2 --llm-pp 2"
TP2 = "--layout colocated --encoder-dp 2 --llm-tp 2 --sequence-parallel"
IMAGE = 144


def step_of(flags: str, preset: str = "10b-even", gpus: int = 2) -> Step:
    config = parse([*presets.PRESETS[preset], "--bf16", "--train-iters", "1", *flags.split()])
    return Step(config, validate(config, gpus), Costs(config, Profile(GPUS["H200"])))


def batch_of(*images: int, text: int = 1000) -> Microbatches:
    """One sample in each microbatch, with so many images."""
    return [[[SampleSize(text, (IMAGE,) * number)]] for number in images]


def image_gib(step: Step) -> float:
    cost = step.costs.encoder("vision", step.layout.encoders[0].tp)
    return cost.layer_bytes * step.costs.image_patches("vision", IMAGE) / GIB


def least_image_gib(step: Step) -> float:
    """Return what is kept of an image if all layers are recomputed."""
    least = step.costs.encoder("vision", 1).recomputed_bytes + step.costs.outside_bytes("vision")
    return least * step.costs.image_patches("vision", IMAGE) / GIB


def test_a_rank_encodes_and_finishes_windows_between_its_passes() -> None:
    alone = order_of_work(WindowSchedule(1, 0, 1, 3))
    assert alone == ((ENCODE, 0), (FORWARD, 0), (BACKWARD, 0), (FINISH, 0), (ENCODE, 1), (FORWARD, 1), (BACKWARD, 1),
                     (FINISH, 1), (ENCODE, 2), (FORWARD, 2), (BACKWARD, 2), (FINISH, 2))
    for stage in range(2):
        order = order_of_work(WindowSchedule(2, stage, 2, 12))
        windows = len(WindowSchedule(2, stage, 2, 12).windows)
        assert sorted(order) == sorted([*((kind, number) for kind in (FORWARD, BACKWARD) for number in range(12)),
                                        *((kind, number) for kind in (ENCODE, FINISH) for number in range(windows))])
        for window in range(windows):
            assert order.index((ENCODE, window)) < order.index((FINISH, window))


def test_images_are_kept_until_their_window_is_finished() -> None:
    # Without stages, one window at a time. Images are whole: five are three and two.
    step = step_of(f"{TP2} --encoder-window 1")
    _, images, _ = step.memory([batch_of(*(5,) * 12)])
    assert images / GIB == pytest.approx(3 * image_gib(step), rel=0.02)
    # With two stages, the windows of three microbatches; the larger and the smaller shares alternate.
    step = step_of(f"{PP2} --encoder-window 1")
    _, images, _ = step.memory([batch_of(*(5,) * 12)])
    assert images / GIB == pytest.approx(8 * image_gib(step), rel=0.02)
    # Windows of two microbatches allow for those of five, but no more than four are ever kept.
    step = step_of(f"{PP2} --encoder-window 2")
    _, images, _ = step.memory([batch_of(*(4,) * 12)])
    assert images / GIB == pytest.approx(8 * image_gib(step), rel=0.02)


def test_rows_are_as_long_as_their_samples_are() -> None:
    step = step_of("--layout homogeneous --llm-pp 2 --llm-pp-layout 20,20")
    short, long = batch_of(*(0,) * 12, text=900), batch_of(*(0,) * 12, text=4000)
    first, second = (step.memory([batch])[0] - step.memory([batch_of(*(0,) * 12, text=200)])[0]
                     for batch in (short, long))
    # Rows of 1,024 and of 4,096 tokens, and of 256.
    assert second / first == pytest.approx((4096 - 256) / (1024 - 256))
    # Two microbatches are in flight on the first stage: a long row beside a short one.
    mixed = batch_of(*(0,) * 12, text=200)
    mixed[5:6] = batch_of(0, text=4000)
    cost = step.language_cost(4096)
    assert step.memory([mixed])[0] - step.memory([batch_of(*(0,) * 12, text=200)])[0] == pytest.approx(
        20 * (cost.layer_bytes - step.language_cost(256).layer_bytes), rel=0.1)


def test_graphs_keep_buffers_for_each_length_and_memory_for_the_longest() -> None:
    plain = step_of("--layout homogeneous --llm-pp 2 --llm-pp-layout 30,10")
    graphs = step_of("--layout homogeneous --llm-pp 2 --llm-pp-layout 30,10 --cuda-graphs")
    batch = [*batch_of(*(0,) * 11, text=200), *batch_of(0, text=1000)]
    buffers = GRAPH_BUFFERS * 2 * sum(graphs.language_cost(length).recomputed_bytes for length in (256, 1024))
    long, short = (30 * graphs.language_cost(length).layer_bytes for length in (1024, 256))
    # Without graphs, a long row is in flight beside a short one, and one of them has gradients.
    gradients = LAYER_GRADIENTS * graphs.language_cost(1024).layer_bytes
    assert graphs.memory([batch])[0] - plain.memory([batch])[0] == pytest.approx(buffers + long - short + gradients)


def test_rows_of_a_new_length_run_beside_the_graphs_if_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of("--layout homogeneous --llm-pp 2 --llm-pp-layout 20,20 --cuda-graphs")
    long, mixed = batch_of(*(0,) * 12, text=2000), batch_of(*(0,) * 12, text=2000)
    mixed[5:7] = batch_of(0, 0, text=1700)
    new, captured = 20 * step.language_cost(1792).layer_bytes, step.memory([long, mixed])[0]
    gradients = LAYER_GRADIENTS * step.language_cost(1792).layer_bytes
    # Two of the new length follow each other, and both run without graphs.
    assert step.memory([long, mixed], from_start=True)[0] - captured == pytest.approx(2 * new + gradients)
    # A length that was there before has graphs.
    assert step.memory([mixed, mixed, long], from_start=True)[0] == captured
    # The optimizer has no state while the first iteration runs. Here, the two modules of the first stage have little.
    first = [*batch_of(*(0,) * 6, text=2000), *batch_of(*(0,) * 6, text=1700)]
    assert step.memory([first], from_start=True)[0] == captured
    with monkeypatch.context() as patch:
        patch.setattr(Step, "moment_bytes", lambda *_: new / 4)
        assert step.memory([first], from_start=True)[0] - captured == pytest.approx(2 * new + gradients - new / 2)
    # Without room the run drops its graphs.
    gpu = replace(GPUS["H200"], memory_gib=(captured + new) / 0.97 / GIB)
    tight = Step(step.config, step.layout, Costs(step.config, Profile(gpu)))
    assert tight.memory([long, mixed], from_start=True)[0] - captured == pytest.approx(new)
    assert tight.memory([long, mixed], from_start=True)[0] <= gpu.usable_bytes


@pytest.mark.parametrize("flags", ["--overlap-grad-reduce", "--overlap-grad-reduce --overlap-param-gather"])
def test_a_microbatch_that_never_has_graphs_runs_beside_them(flags: str) -> None:
    layout = "--layout homogeneous --llm-dp 2 --cuda-graphs"
    plain, overlapped = step_of(layout), step_of(f"{layout} {flags}")
    batch = [[[SampleSize(2000)], [SampleSize(2000)]] for _ in range(6)]
    row = 40 * plain.language_cost(2048).layer_bytes
    assert overlapped.memory([batch])[0] - plain.memory([batch])[0] == pytest.approx(row)


def test_a_budget_holds_for_the_windows_that_a_replica_has_not_finished() -> None:
    step = step_of(f"{TP2} --encoder-window 1 --encoder-activation-gib 7")
    each = image_gib(step) - least_image_gib(step)
    dealt = Windows(step, batch_of(2, 8, *(2,) * 10))
    # One image fits, but only some of the 20 layers of four.
    layers = int(7 / (4 * each / 20))
    assert dealt.recomputed[0] == [0.0, 0.0] and dealt.recomputed[2] == [0.0, 0.0] and 10 < layers < 20
    assert dealt.recomputed[1] == pytest.approx([1 - layers / 20] * 2)
    assert dealt.bytes[0][1] == pytest.approx([4 * (layers / 20 * each + least_image_gib(step)) * GIB] * 2)
    whole = Windows(step_of(f"{TP2} --encoder-window 1"), dealt._batch)
    again = dealt.work()[1][1][0].seconds - whole.work()[1][1][0].seconds
    assert again == pytest.approx((1 - layers / 20) * 4 * step.costs.image_s("vision", 1, IMAGE)[1])
    assert dealt.again_s() == pytest.approx(2 * again)
    # With stages, a window gets what the windows before it leave.
    staged = Windows(step_of(f"{PP2} --encoder-window 1 --encoder-activation-gib {2.51 * each}"), batch_of(*(2,) * 12))
    assert staged.recomputed[0] == [0.0, 0.0] and max(staged.recomputed[2]) == pytest.approx(0.5)


def test_calls_that_are_larger_than_all_before_are_recomputed_at_the_start_of_a_run() -> None:
    step, largest = step_of(f"{TP2} --encoder-window 1 --encoder-activation-gib 30"), [0.0, 0.0]
    dealt = Windows(step, batch_of(2, 8, 8, *(2,) * 9))
    assert dealt.share_recomputed(largest)[:4] == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert largest == [4 * step.costs.image_patches("vision", IMAGE)] * 2
    assert dealt.share_recomputed(largest) == dealt.recomputed == [[0.0, 0.0]] * 12
    # Rows of a new length run beside the graphs, and the images beside both, unless all of these are recomputed.
    step = step_of(f"{TP2} --encoder-window 0 --cuda-graphs --encoder-activation-gib 30")
    few, many, longer = batch_of(*(2,) * 12), batch_of(*(5,) * 12), batch_of(*(5,) * 12, text=2000)
    for first, beside in ((few, False), (many, True)):
        further = step.memory([first, longer], from_start=True)[0] - step.memory([first, longer])[0]
        assert (further > 0) == beside


def test_the_backward_pass_of_a_window_needs_gradients_and_the_layer_that_is_recomputed() -> None:
    def further(flags: str) -> list[float]:
        _, (found,) = Windows(step_of(f"{TP2} --encoder-window 0 {flags}"), batch).bytes
        return found

    # Each of two replicas has 30 images, and the encoder 20 layers. A chunk has a third of the images.
    batch, layer = batch_of(*(5,) * 12), 30 * image_gib(step_of(f"{TP2} --encoder-window 0")) * GIB / 20
    for flags, layers in (("", 0.5), ("--encoder-activation-gib 0", 1.5),
                          ("--encoder-activation-gib 0 --encoder-chunk 10", 0.5)):
        assert further(flags) == pytest.approx([layers * layer] * 2, rel=0.02), flags
    # A shortened iteration stands for one of which a chunk is a smaller share.
    chunked = "--encoder-activation-gib 0 --encoder-chunk 10"
    assert further(f"{chunked} --global-batch-size 48") == pytest.approx(further(chunked))
    # The activations that were kept are freed before a layer is recomputed.
    step = step_of(f"{TP2} --encoder-window 0")
    beyond = 30 * (image_gib(step) - least_image_gib(step)) / 20
    for kept, more in ((1.01, 1.5 * layer - beyond * GIB), (2.01, 0.5 * layer)):
        assert further(f"--encoder-activation-gib {kept * beyond}") == pytest.approx([more] * 2, rel=0.02)
    # With graphs, the memory of rows is still taken.
    step = step_of(f"{TP2} --encoder-window 0 --encoder-activation-gib 0 --cuda-graphs")
    (own,), (more,) = Windows(step, batch).bytes
    assert own == pytest.approx([30 * least_image_gib(step) * GIB] * 2)
    assert step.memory([batch])[1] == pytest.approx(own[0] + more[0] + sum(image_bytes(step, [batch])))


@pytest.mark.parametrize(("flags", "recomputes", "layers"), [("", False, 0.5), ("--encoder-recompute full", True, 1.5)])
def test_the_backward_pass_of_an_encoder_without_windows_needs_the_same(flags: str, recomputes: bool, layers: float
                                                                      ) -> None:
    # With graphs, the memory of rows is still taken. The first of two lanes has more images.
    step = step_of(f"--layout homogeneous --llm-dp 2 --cuda-graphs {flags}")
    batch = [[[SampleSize(1000, (IMAGE,) * number)] for number in (5, 2)] for _ in range(6)]
    own = 5 * (least_image_gib(step) if recomputes else image_gib(step))
    assert step.memory([batch])[1] / GIB == pytest.approx(own + layers * 5 * image_gib(step) / 20, rel=0.02)
    # On a grid of its own, an encoder has the images of two microbatches when the first backward pass begins.
    step = step_of(f"--encoder-dp 1 --llm-dp 1 --num-layers 2 {flags}")
    _, images, fullest = step.memory([batch_of(*(5,) * 12)])
    assert fullest == "vision"
    assert images / GIB == pytest.approx(2 * own + layers * 5 * image_gib(step) / 20, rel=0.02)


def test_layers_outside_of_which_an_encoder_takes_time_repeat_nothing_else() -> None:
    config = parse([*presets.PRESETS["10b-even"], "--bf16"])
    deep = parse([*presets.PRESETS["10b-share35-even"], "--bf16"])
    measured = Ratios(1, forward=1.5, backward=1.0, layers=20)
    profile = Profile(GPUS["H200"], modules={"vision": [measured, replace(measured, tp=2)]})
    plain, shallow, twice = (Costs(*each).image_s("vision", 1, IMAGE) for each in (
        (config, Profile(GPUS["H200"])), (config, profile), (deep, profile)))
    assert shallow == pytest.approx((1.5 * plain[0], plain[0], plain[2]))
    outside = shallow[0] - shallow[1]
    assert twice[0] - twice[1] == pytest.approx(outside, rel=0.03)
    assert twice[1] / shallow[1] == pytest.approx(52 / 20, rel=0.03)
    # All tensor-parallel ranks do what is outside of the layers.
    split = Costs(config, Profile(GPUS["H200"], modules={"vision": [measured]})).image_s("vision", 4, IMAGE)
    assert split[0] - split[1] == pytest.approx(outside)


def test_tensor_parallel_ranks_of_an_encoder_all_keep_what_norms_and_residuals_need() -> None:
    costs = step_of(PP2).costs
    one, two, four = (costs.encoder("vision", tp).layer_bytes for tp in (1, 2, 4))
    # Of 32 bytes of each token and channel, 8 are not split.
    assert (two / one, four / one) == pytest.approx((20 / 32, 14 / 32), rel=0.01)
    assert costs.encoder("vision", 2).forward.patch_s > 0 == costs.encoder("vision", 1).forward.patch_s
