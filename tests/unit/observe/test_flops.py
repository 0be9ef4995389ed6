"""FLOPs of training steps: sums over sequences, causal halves, frozen parts, recomputation, padding, peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.observability.flops import CHUNK, FlopComponent, FlopsCounter, SequenceSums, forward_flops, peak_tflops
from mimo.protocols import LANGUAGE

# Sizes that no sum of others equals.
PATCHES = FlopComponent(name="patches", module="vision", part="vision", linear=1e2, opens_part=True,
                        parallel_linear=False)
ENCODER = FlopComponent(name="layers", module="vision", part="vision", linear=1e4)
PROJECTOR = FlopComponent(name="projector", module="vision", part="projector", linear=1e6, opens_part=True)
DECODER = FlopComponent(name="layers", module=LANGUAGE, part=LANGUAGE, linear=1e8, recomputed=True)
OUTPUT = FlopComponent(name="output layer", module=LANGUAGE, part=LANGUAGE, linear=1e10)
MODEL = (PATCHES, ENCODER, PROJECTOR, DECODER, OUTPUT)
ONE_TOKEN = {"vision": SequenceSums.of([1]), LANGUAGE: SequenceSums.of([1])}
LENGTHS = st.lists(st.integers(1, 700), max_size=6)


def passes(total: float) -> list[float]:
    """Return how often each component of `MODEL` was computed, in order."""
    return [round(total / component.linear) % 100 for component in MODEL]


@pytest.mark.parametrize(("frozen", "expected"), [
    # The pixels need no gradient.
    ("", [2, 3, 3, 3, 3]),
    # Features of a frozen encoder need none, but in plain PyTorch the projector computes one.
    ("vision", [1, 1, 2, 3, 3]),
    # Frozen weights have no gradient; what they multiply has.
    ("vision,language", [1, 1, 2, 2, 2]),
    ("language", [2, 3, 3, 2, 2]),
    ("projector", [2, 3, 2, 3, 3]),
    ("vision,projector", [1, 1, 1, 3, 3]),
])
def test_frozen_parts_cost_no_weight_gradients(frozen, expected):
    counter = FlopsCounter(MODEL, frozen=frozenset(frozen.split(",")), fused=False)
    found = counter.model_flops(ONE_TOKEN)
    assert passes(sum(found.values())) == expected and set(found) == {"vision", LANGUAGE}
    assert passes(found["vision"])[3:] == [0, 0]
    unneeded = {"vision": [0, 0, 1, 0, 0]}.get(frozen, {"vision,language": [0, 0, 1, 0, 0]}.get(frozen, [0] * 5))
    assert passes(sum(counter.hardware_flops(ONE_TOKEN).values())) == [
        one + more for one, more in zip(expected, unneeded, strict=True)]
    assert passes(sum(FlopsCounter(MODEL, frozen=counter.frozen).hardware_flops(ONE_TOKEN).values())) == expected


def test_logits_of_some_tokens_at_a_time_are_computed_again() -> None:
    logits = replace(OUTPUT, makes_logits=True)
    for frozen, times in (("", 4), (LANGUAGE, 3), (f"vision,projector,{LANGUAGE}", 1)):
        counter = FlopsCounter((PATCHES, ENCODER, PROJECTOR, DECODER, logits), frozen=frozenset(frozen.split(",")),
                               logits_again=True)
        assert passes(sum(counter.hardware_flops(ONE_TOKEN).values()))[-1] == times
        assert passes(sum(counter.model_flops(ONE_TOKEN).values()))[-1] == times - (times > 1)


def test_products_of_activations_need_the_gradients_of_both_even_where_weights_are_frozen():
    layers = replace(DECODER, linear=0.0, attention=1.0, causal=True, scan=100.0)
    sums = {"vision": SequenceSums(), LANGUAGE: SequenceSums.of([10])}
    for frozen, times in (("", 3), (LANGUAGE, 3), ("vision,projector", 3), (f"vision,projector,{LANGUAGE}", 1)):
        counter = FlopsCounter((PATCHES, ENCODER, PROJECTOR, layers), frozen=frozenset(frozen.split(",")))
        assert counter.model_flops(sums)[LANGUAGE] == times * (50 + 1000)


def test_other_encoders_do_not_send_gradients_into_a_frozen_one():
    other = [replace(component, module="thermal", part=component.part.replace("vision", "thermal"))
             for component in (PATCHES, ENCODER)]
    sums = ONE_TOKEN | {"thermal": SequenceSums.of([1])}
    found = FlopsCounter((PATCHES, ENCODER, *other, DECODER), frozen=frozenset({"thermal", LANGUAGE})).model_flops(sums)
    assert found == {"vision": 2 * 1e2 + 3 * 1e4, "thermal": 1e2 + 1e4, LANGUAGE: 2 * 1e8}


@pytest.mark.parametrize(("recompute", "frozen", "more"), [
    ("none", "", 0), ("selective", "", 100), ("full", "", 100 + 1e8 * 10),
    ("full", LANGUAGE, 100 + 1e8 * 10), ("full", "vision,projector,language", 0),
])
def test_recomputation_is_work_of_the_hardware_alone(recompute, frozen, more):
    layers = replace(DECODER, attention=2.0, causal=True)
    sums = {"vision": SequenceSums.of([1]), LANGUAGE: SequenceSums.of([10])}
    without, found = (FlopsCounter((ENCODER, layers, OUTPUT), frozen=frozenset(frozen.split(",")), recompute=how)
                      for how in ("none", recompute))
    assert found.model_flops(sums) == without.model_flops(sums)
    assert found.hardware_flops(sums)[LANGUAGE] - without.hardware_flops(sums)[LANGUAGE] == more


def test_causal_products_need_half_of_the_pairs():
    attention = replace(DECODER, linear=0.0, attention=1.0)
    sums = SequenceSums.of([6, 2])
    assert forward_flops(attention, sums).attention == 36 + 4
    causal = replace(attention, causal=True)
    assert forward_flops(causal, sums).attention == 20 and forward_flops(causal, sums, whole=True).attention == 40
    tokens = {LANGUAGE: sums}
    # Kernels leave out what is masked; plain PyTorch multiplies it.
    assert FlopsCounter((causal,)).hardware_flops(tokens) == {LANGUAGE: 60}
    assert FlopsCounter((causal,), fused=False).hardware_flops(tokens) == {LANGUAGE: 120}


@given(lengths=LENGTHS, factor=st.integers(1, 4), extra=st.integers(0, 9))
def test_sums_stand_for_every_sequence(lengths, factor, extra):
    component = FlopComponent(name="layers", module="vision", part="vision", linear=3.0, attention=5.0,
                              tokens_per_token=factor, extra_tokens=extra)
    inside = [factor * length + extra for length in lengths]
    assert forward_flops(component, SequenceSums.of(lengths)).total == sum(3 * n + 5 * n**2 for n in inside)


@given(one=LENGTHS, two=LENGTHS)
def test_sums_of_lanes_add_up(one, two):
    assert SequenceSums.of(one) + SequenceSums.of(two) == SequenceSums.of([*one, *two])


def test_the_scan_is_linear_from_chunk_to_chunk():
    scan = FlopComponent(name="layers", module=LANGUAGE, part=LANGUAGE, scan=3.0, scan_pairs=2.0)
    assert forward_flops(scan, SequenceSums.of([4 * CHUNK])).scan == 4 * forward_flops(
        scan, SequenceSums.of([CHUNK])).scan == 4 * (3 * CHUNK + CHUNK**2)
    # The last chunk is as long as what is left.
    assert forward_flops(scan, SequenceSums.of([CHUNK + 10])).scan == 3 * (CHUNK + 10) + CHUNK**2 + 10**2


def test_rows_are_computed_with_their_padding_and_the_scan_runs_through_them():
    sums = SequenceSums.of_rows([(100, 50, 50), (200,)], 200)
    assert (sums.sequences, sums.tokens, sums.squares) == (4, 400, 100**2 + 2 * 50**2 + 200**2)
    # Chunks do not stop between sequences; the second one is filled.
    assert (sums.scan_tokens, sums.scan_squares) == (2 * 2 * CHUNK, 2 * 2 * CHUNK**2)
    short = SequenceSums.of_rows([(30, 70)], 100)
    assert (short.scan_tokens, short.scan_squares) == (100, 100**2)


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.0),
                                            ("NVIDIA H100 NVL", 835.5), ("NVIDIA H200", 989.5), ("NVIDIA B200", 2250.0),
                                            ("NVIDIA GB200", 2500.0), ("NVIDIA H200 MIG 1g.18gb", None), ("", None),
                                            ("NVIDIA GeForce RTX 4090", None)])
def test_peaks_go_by_the_name_of_the_device(name, peak):
    assert peak_tflops(name) == peak
