"""Lengths of a batch as the sums that FLOPs follow from, and the figures of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from mimo.data.batch import Microbatch
from mimo.data.collate import Placeholders, collate_text
from mimo.grid.layout import build_layout
from mimo.observability.flops import FlopComponent, SequenceSums
from mimo.protocols import LANGUAGE, Sample
from mimo.registry import MODEL_PROVIDERS, model_provider
from mimo.training.step_metrics import FlopsMeter, Workload, encoded_tokens, num_values, workload
from mimo.visual import Tiles

IMAGE, ROW = 9, 20
# Text tokens and images of three samples; an image is three tokens, or four where it is larger.
SAMPLES = ((5, ()), (4, ((1, 1),)), (2, ((1, 1), (2, 2))))


def sample(number: int, text: int, sizes: tuple[tuple[int, int], ...]) -> Sample:
    tokens = np.array([IMAGE] * len(sizes) + [1] * text)
    return Sample(str(number), tokens, tokens != IMAGE, list(sizes))


def microbatch(samples: list[Sample], modules: dict[str, int]) -> Microbatch:
    return Microbatch(collate_text(samples, images=Placeholders(modules, lambda module, height, width: 2 + height),
                                   seq_length=ROW, vocab_size=10, pad_token_id=0), {})


def test_samples_in_rows_of_their_own():
    samples = [sample(number, *size) for number, size in enumerate(SAMPLES)]
    found = workload([microbatch(part, {"vision": IMAGE}) for part in (samples[:2], samples[2:])], ["vision"])
    assert found.text == SequenceSums.of([5, 4 + 3, 2 + 3 + 4])
    assert found.padded == SequenceSums.of_rows([(ROW,)] * 3, ROW)
    assert found.images == {"vision": SequenceSums.of([3, 3, 4])}


@pytest.mark.parametrize("filled", [False, True])
def test_samples_of_a_pack_attend_to_themselves_and_padding_is_one_of_them(filled):
    sizes = SAMPLES if filled else SAMPLES[:2]
    parts = [sample(number, *size) for number, size in enumerate(sizes)]
    if filled:  # the row's last token, too
        parts[0] = sample(0, 4, ())
    tokens = np.concatenate([part.tokens for part in parts])
    pack = Sample("pack", tokens, tokens != IMAGE, [size for part in parts for size in part.image_sizes],
                  lengths=tuple(len(part.tokens) for part in parts))
    found = workload([microbatch([pack], {"vision": IMAGE})], ["vision"])
    lengths = (4, 7, 9) if filled else (5, 7)
    assert found.text == SequenceSums.of(lengths)
    assert found.padded == SequenceSums.of_rows([lengths if filled else (*lengths, ROW - 12)], ROW)


def test_every_encoder_has_its_own_images():
    tokens = np.array([IMAGE, 8, IMAGE, 1])
    two = Sample("two", tokens, tokens == 1, [(1, 1), (2, 2), (3, 3)])
    found = workload([microbatch([two], {"vision": IMAGE, "thermal": 8})], ["vision", "thermal"])
    assert found.images == {"vision": SequenceSums.of([3, 5]), "thermal": SequenceSums.of([4])}


def test_lanes_are_compared_by_what_encoders_compute():
    tiles = Tiles((2, 2), ((2, 4), (4, 4)), (1, 1))
    thin, square = (8, 2), (4, 4)
    samples = [sample(0, 3, (thin,)), replace(sample(1, 3, (square, thin)), unbalanced_encoded_tokens=7)]
    images = Placeholders({"vision": IMAGE}, lambda module, height, width: tiles.num_joined(height, width), tiles=tiles)
    batch = Microbatch(collate_text(samples, images=images, seq_length=ROW, vocab_size=10, pad_token_id=0), {})
    assert batch.text is not None and batch.text.token_counts == {"vision": (3, 10)}
    # Each image has five tiles, whose borders are not all joined.
    assert encoded_tokens([batch, microbatch(samples[:1], {"vision": IMAGE})]) == ([15.0, 10.0], [7.0, 0.0])
    assert sum(images.tokens for images in workload([batch], ["vision"]).images.values()) == 15
    assert encoded_tokens([Microbatch(None, {})]) == ([0.0], [0.0])


def test_work_of_lanes_is_summed_as_numbers():
    names = ["vision", "thermal"]
    own = Workload(SequenceSums.of([3]), SequenceSums.of_rows([(8,)], 8), {"vision": SequenceSums.of([1, 2]),
                                                                           "thermal": SequenceSums()})
    assert len(own.values()) == num_values(names)
    doubled = Workload.from_values([2 * value for value in own.values()], names)
    assert doubled.text == SequenceSums.of([3, 3]) and doubled.images["vision"] == SequenceSums.of([1, 2, 1, 2])
    assert Workload.from_values(own.values(), names) == own


def run_config(*flags: str) -> RunConfig:
    return parse(["--model-provider", "mock", "--dataset-provider", "mock", "--device", "cpu", "--train-iters", "1",
                  "--seq-length", "128", *flags])


def meter_of(config: RunConfig, provider: Any, device_name: str = "", ranks: int = 2) -> FlopsMeter | None:
    return FlopsMeter.of(config, provider, validate(config, ranks), impl="local", device_name=device_name)


WORK = Workload(SequenceSums.of([100]), SequenceSums.of_rows([(128,)], 128), {"vision": SequenceSums.of([16])})


def test_figures_are_per_gpu_and_over_the_whole_step():
    meter = meter_of(run_config(), model_provider("mock"))
    assert meter is not None
    found = meter.figures(WORK, 0.5)
    assert found["tflops"] == pytest.approx(sum(found["flops"].values()) / 0.5 / 2 / 1e12)
    assert found["mfu"] is None and list(found["flops"]) == ["vision", LANGUAGE]
    assert found["hardware_flops"][LANGUAGE] > found["flops"][LANGUAGE] > 0


def test_every_context_parallel_rank_of_a_homogeneous_layout_computes_the_encoder():
    flags = ("--layout", "homogeneous", "--llm-cp", "2")
    shared, alone = meter_of(run_config(*flags), model_provider("mock")), meter_of(run_config(), model_provider("mock"))
    assert shared is not None and alone is not None
    found, expected = shared.figures(WORK, 1.0), alone.figures(WORK, 1.0)
    assert found["flops"] == expected["flops"]
    assert found["hardware_flops"]["vision"] == 2 * expected["hardware_flops"]["vision"]
    assert found["hardware_flops"][LANGUAGE] == expected["hardware_flops"][LANGUAGE]


@pytest.mark.parametrize(("flags", "device", "peak"), [
    ((), "NVIDIA H200", 989.5), (("--peak-tflops", "500"), "NVIDIA H200", 500.0), (("--peak-tflops", "0.5"), "", 0.5),
])
def test_the_peak_is_the_flags_or_the_devices(flags, device, peak):
    meter = meter_of(run_config(*flags), model_provider("mock"), device)
    assert meter is not None
    found = meter.figures(WORK, 1.0)
    assert found["mfu"] == pytest.approx(found["tflops"] / peak)


def test_a_run_without_the_encoder_counts_the_language_model_alone():
    meter = meter_of(run_config("--llm-only", "--mock-images-max", "0"), model_provider("mock"), ranks=1)
    assert meter is not None and {component.module for component in meter.counter.components} == {LANGUAGE}
    assert list(meter.figures(replace(WORK, images={}), 1.0)["flops"]) == [LANGUAGE]


def test_a_provider_that_leaves_out_a_module_has_no_figures():
    class LanguageAlone(type(model_provider("mock"))):  # type: ignore[misc]
        def flop_components(self, config: Any) -> list[FlopComponent]:
            return [part for part in super().flop_components(config) if part.module == LANGUAGE]

    assert meter_of(run_config(), LanguageAlone()) is None
    assert meter_of(run_config(), object()) is None


def test_a_provider_that_builds_another_module_than_its_base_has_to_count_it():
    mock = type(model_provider("mock"))

    class OtherEncoder(mock):  # type: ignore[misc, valid-type]
        def encoder_spec(self, *arguments: Any) -> Any:
            return super().encoder_spec(*arguments)

    class Counted(OtherEncoder):
        def flop_components(self, config: Any) -> list[FlopComponent]:
            return super().flop_components(config)

    class Renamed(Counted):
        pass

    assert meter_of(run_config(), OtherEncoder()) is None
    assert meter_of(run_config(), Counted()) is not None and meter_of(run_config(), Renamed()) is not None


def test_a_family_whose_base_counts_its_modules_is_counted_until_a_subclass_builds_others():
    qwen = type(model_provider("qwen3_vl"))

    class OtherLanguage(qwen):  # type: ignore[misc, valid-type]
        def language_spec(self, *arguments: Any) -> Any:
            return super().language_spec(*arguments)

    config = run_config("--model-provider", "qwen3_vl")
    assert meter_of(config, qwen()) is not None and meter_of(config, OtherLanguage()) is None


@pytest.mark.parametrize("name", MODEL_PROVIDERS)
def test_every_family_has_figures(name):
    config, provider = run_config("--model-provider", name), model_provider(name)
    layout = build_layout(config.layout, 0, provider.encoders(config.model_family))
    meter = FlopsMeter.of(config, provider, layout, impl="local", device_name="")
    assert meter is not None and {component.module for component in meter.counter.components} == set(layout.grids)


def test_freezing_and_recomputation_are_those_of_the_run():
    frozen, recomputed = (meter_of(run_config(*flags.split()), model_provider("mock"))
                          for flags in ("--freeze vision,projector", "--recompute full"))
    assert frozen is not None and recomputed is not None
    one, two = frozen.figures(WORK, 1.0), recomputed.figures(WORK, 1.0)
    assert one["flops"]["vision"] < two["flops"]["vision"] and one["flops"][LANGUAGE] == two["flops"][LANGUAGE]
    assert one["hardware_flops"][LANGUAGE] < two["hardware_flops"][LANGUAGE]
