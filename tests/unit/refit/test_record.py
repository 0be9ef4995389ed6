"""Traces of vLLM's loaders, compared with really loading, for any rank and any sizes in one process."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from mimo.refit.tensor_slices import TensorMeta, TensorSlice
from tests.support.lazy import Lazy, Rank
from tests.support.marks import fast_only

if TYPE_CHECKING:
    from mimo.refit.loader_trace import Recording

loader_trace, worker_plan, tiny = map(Lazy, (
    "mimo.refit.loader_trace", "mimo.refit.worker_plan", "tests.support.vllm_models"))
Tensors = dict[str, torch.Tensor]
# The query heads of all models are 8, their key heads 2: of eight ranks, four hold the same.
RANKS = [Rank(), Rank(tp=(1, 2)), Rank(tp=(3, 4)), Rank(tp=(5, 8))]
CASES = [
    *((name, rank) for name in ("qwen3", "qwen3-tied", "nemotron-h", "deepseek-v3") for rank in RANKS),
    *(("qwen3-moe", rank) for rank in (*RANKS, *(Rank(tp=place, experts_over_tp=True) for place in ((1, 2), (2, 4))))),
    *((name, Rank(tp=(1, 2), experts_over_tp=True)) for name in ("deepseek-v3", "nemotron-h-latent")),
    *(("nemotron-h-latent", rank) for rank in RANKS[:3]),
    *(("llava", rank) for rank in RANKS[:3]),
    *(("qwen3", Rank(pp=(stage, 2))) for stage in range(2)), ("nemotron-h", Rank(tp=(1, 2), pp=(1, 3))),
]
FAST = {("qwen3", Rank(tp=(5, 8))), ("qwen3-tied", Rank(tp=(1, 2))), ("deepseek-v3", Rank(tp=(1, 2))),
         ("qwen3-moe", Rank(tp=(2, 4), experts_over_tp=True)), ("nemotron-h", Rank(tp=(3, 4))),
         ("nemotron-h-latent", Rank(tp=(1, 2), experts_over_tp=True))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Tensors]]]:
    """Checkpoints by name, each made at its first use."""
    class Saved(dict):  # type: ignore[type-arg]
        def __missing__(self, name: str) -> tuple[Path, Tensors]:
            folder = tmp_path_factory.mktemp(name)
            self[name] = (folder, tiny.checkpoint(name, folder))
            return self[name]
    yield Saved()


def write(slices: Iterable[TensorSlice], tensors: Tensors, places: Tensors) -> None:
    """The direct route, without a wire."""
    for part in slices:
        values = tensors[part.name][part.box.slices]
        place, address = places[part.address.tensor], part.address
        place.as_strided(part.box.sizes, address.strides, place.storage_offset() + address.offset).copy_(values)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("name", "rank"), fast_only(FAST, CASES))
def test_recorded_boxes_fill_buffers_as_loading_fills_the_model(saved, name, rank):
    folder, tensors = saved[name]
    with tiny.as_rank(folder, rank) as config:
        model = tiny.build(config)
        recording = loader_trace.record(model, tiny.entries_of(tensors))
        assert all(tensor.isnan().all() for tensor in model.parameters()), "recording has written to the model"
        loader_trace.check_coverage(model, recording)
        slices = [part for group in recording.slices.values() for part in group]
        buffers = {}
        for path in dict.fromkeys(part.address.tensor for part in slices):
            view, dtype = recording.layouts[path].view, getattr(torch, recording.layouts[path].dtype)
            buffers[path] = torch.empty_strided(view.sizes, view.strides, dtype=dtype).zero_()
        model.load_weights(iter(tensors.items()))
    assert set(recording.computed) == {key for key in tensors if key.endswith("A_log")} - set(recording.untaken)
    write(slices, tensors, buffers)
    loaded = dict(model.named_parameters())
    computed = {write.path for writes in recording.computed.values() for write in writes}
    assert loaded.keys() == buffers.keys() | computed
    for path, buffer in buffers.items():
        assert same_bytes(buffer, loaded[path].data), path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [
    ("qwen3", [Rank(pp=(stage, 2)) for stage in range(2)]),
    ("qwen3-moe", [Rank(tp=(tp, 2), experts_over_tp=True) for tp in range(2)])])
def test_every_name_is_taken_by_some_worker(saved, name, ranks):
    folder, tensors = saved[name]
    untaken = []
    for rank in ranks:
        with tiny.as_rank(folder, rank) as config:
            untaken.append(set(loader_trace.record(tiny.build(config), tiny.entries_of(tensors)).untaken))
    assert all(untaken) and not set.intersection(*untaken)


def test_a_missing_tensor_is_an_error_with_its_number_of_elements(saved):
    folder, tensors = saved["qwen3"]
    entries = [entry for entry in tiny.entries_of(tensors) if "layers.1.self_attn.k_proj" not in entry.name
               and "layers.0.input_layernorm" not in entry.name]
    with tiny.as_rank(folder, Rank(tp=(1, 2))) as config:
        model = tiny.build(config)
        with pytest.raises(ValueError) as error:
            loader_trace.check_coverage(model, loader_trace.record(model, entries))
    assert "model.layers.1.self_attn.qkv_proj.weight: 1024 of 6144 elements are never written" in str(error.value)
    assert "model.layers.0.input_layernorm.weight: 32 of 32 elements are never written" in str(error.value)
    assert str(error.value).count("elements") == 2


def test_a_repeated_or_refused_tensor_is_an_error_and_hides_no_other(saved):
    folder, tensors = saved["qwen3"]
    entries = tiny.entries_of(tensors)
    wide = [TensorMeta(entry.name, entry.dtype, (33,)) if entry.name == "model.norm.weight" else entry
            for entry in entries]
    odd = TensorMeta("model.layers.0.self_attn.odd", "float32", (4,))
    copy = TensorMeta("model.layers.0.mlp.gate_up_proj.weight", "float32", (96, 32))
    with tiny.as_rank(folder, Rank()) as config:
        model = tiny.build(config)
        recording = loader_trace.record(model, [odd, *wide[:9], copy, *wide[9:]])
        whole = loader_trace.record(model, entries)
        with pytest.raises(ValueError) as error:
            loader_trace.check_coverage(model, recording)
    assert recording.refused.keys() == {odd.name, "model.norm.weight"}
    assert {name: slices for name, slices in recording.slices.items() if name != copy.name} == {
        name: slices for name, slices in whole.slices.items() if name != "model.norm.weight"}
    for message in (f"{odd.name} is refused", "model.norm.weight is refused: AssertionError",
                    "gate_up_proj.weight: 3072 elements are written twice",
                    "model.norm.weight: 32 of 32 elements are never written"):
        assert message in str(error.value)


def test_keeping_float32_is_checked_and_routing_biases_are_recorded(saved: dict[str, tuple[Path, Tensors]]) -> None:
    folder, tensors = saved["deepseek-v3"]
    bias, router = "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.gate.weight"
    entries = [entry if entry.name == bias else dataclasses.replace(entry, dtype="bfloat16")
               for entry in tiny.entries_of(tensors)]
    with tiny.as_rank(folder, Rank(), "bfloat16") as config:
        model = tiny.build(config)
        recording = loader_trace.record(model, entries)
        loader_trace.check_coverage(model, recording)
        kept = [dataclasses.replace(entry, keep_fp32=entry.name == bias) for entry in entries]
        rounded = [dataclasses.replace(entry, keep_fp32=entry.name == router) for entry in entries]
        assert worker_plan.routes(model, recording, kept)
        with pytest.raises(ValueError, match=f"{router} must keep float32, but the engine holds it as bfloat16"):
            worker_plan.routes(model, recording, rounded)
    (part,) = recording.slices[bias]
    assert recording.layouts[part.address.tensor].dtype == "float32"


def state(model: torch.nn.Module) -> dict[str, tuple[int, object]]:
    """Everything that a module refers to, and the contents of its tensors."""
    found = {}
    for path, module in model.named_modules():
        for kind in ("_parameters", "_buffers", "_modules"):
            for name, value in vars(module)[kind].items():
                content = value.tolist() if isinstance(value, torch.Tensor) else None
                found[f"{path}.{kind}.{name}"] = (id(value), content)
        found |= {f"{path}.{name}": (id(value), None) for name, value in vars(module).items()}
        found[f"{path} transient"] = (0, sorted(module._non_persistent_buffers_set))
    return found


@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("nemotron-h", marks=pytest.mark.slow)])
def test_a_processed_model_is_recorded_as_it_was_and_stays_as_it_is(saved, name):
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    folder, tensors = saved[name]
    with tiny.as_rank(folder, Rank()) as config:
        model = tiny.build(config)
        before = state(model)
        expected = loader_trace.record(model, tiny.entries_of(tensors))
        assert str(state(model)) == str(before)  # NaN is not itself
        model.load_weights(iter(tensors.items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        before = state(model)
        recording = loader_trace.record(model, tiny.entries_of(tensors))
        assert state(model) == before
        loader_trace.check_coverage(model, recording)
    assert any(tensor.numel() == 0 for tensor in model.parameters()), "nothing was repacked"
    assert dataclasses.replace(recording, layouts={}) == dataclasses.replace(expected, layouts={})
    parameters = {path: layout for path, layout in recording.layouts.items() if layout.parameter}
    assert parameters == {path: layout for path, layout in expected.layouts.items() if layout.parameter}


class Loader(torch.nn.Module):
    """A loader with the habits of several: reads values, puts off, ignores, pads, erases, keeps work spaces, raises."""

    def __init__(self) -> None:
        super().__init__()
        self.space = torch.full((8, 3), 7.0)
        self.a, self.b, self.c = (torch.nn.Linear(3, 4) for _ in range(3))
        self.register_buffer("e_score_correction_bias", torch.zeros(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        later = []
        for name, tensor in weights:
            if name.startswith("later."):
                later.append((name.removeprefix("later."), tensor.clone()))
            elif name.startswith("scaled."):
                own[name.removeprefix("scaled.")].data.copy_(tensor * tensor.flatten()[0].item())
            elif name.startswith("erased."):
                own[name.removeprefix("erased.")].data.copy_(tensor)
                own[name.removeprefix("erased.")].data[1:].zero_()
            elif name.startswith("staged."):
                self.space[:4].copy_(tensor)
                own[name.removeprefix("staged.")].data.copy_(self.space[:4])
            elif not name.startswith("other."):
                own[name].data[tensor.shape[0]:].zero_()
                own[name].data[:tensor.shape[0]].copy_(tensor)
        for name, tensor in later:
            own[name].data.copy_(tensor)


WEIGHT, BIAS = (4, 3), (4,)


def entries(**shapes: tuple[int, ...]) -> list[TensorMeta]:
    return [TensorMeta(name.replace("__", "."), "float32", shape) for name, shape in shapes.items()]


def recorded(**shapes: tuple[int, ...]) -> tuple[Loader, Recording]:
    model = Loader()
    return model, loader_trace.record(model, entries(**shapes))


def test_a_loader_that_reads_values_or_raises_loses_no_other_name() -> None:
    model, recording = recorded(
        scaled__a__weight=WEIGHT, a__bias=BIAS, b__odd=WEIGHT, later__b__weight=WEIGHT, later__c__odd=WEIGHT,
        scaled__b__bias=BIAS, later__c__weight=WEIGHT, other__weight=WEIGHT, c__bias=(5,),
        erased__e_score_correction_bias=BIAS)
    assert recording.computed.keys() == {"scaled.a.weight", "scaled.b.bias", "erased.e_score_correction_bias"}
    assert recording.slices.keys() == {"a.bias", "later.b.weight", "later.c.weight"}
    assert recording.untaken == ("other.weight",)
    assert recording.refused.keys() == {"b.odd", "later.c.odd", "c.bias"}
    with pytest.raises(ValueError, match="c.bias: 4 of 4 elements are never written"):
        loader_trace.check_coverage(model, recording)


def test_a_work_space_that_a_loader_keeps_loses_no_name() -> None:
    model, recording = recorded(a__bias=BIAS, staged__a__weight=WEIGHT, b__weight=WEIGHT, staged__c__weight=WEIGHT)
    assert recording.computed.keys() == {"staged.a.weight", "staged.c.weight"}
    assert not recording.untaken and not recording.refused
    assert recording.slices.keys() == {"a.bias", "b.weight"}
    assert torch.equal(model.space, torch.full((8, 3), 7.0))


def test_a_buffer_that_a_checkpoint_may_hold_has_to_be_filled() -> None:
    shapes = {f"{part}__{kind}": shape for part in "abc" for kind, shape in (("weight", WEIGHT), ("bias", BIAS))}
    model, recording = recorded(**shapes)
    with pytest.raises(ValueError, match="e_score_correction_bias: 4 of 4 elements are never written"):
        loader_trace.check_coverage(model, recording)
    loader_trace.check_coverage(*recorded(**shapes, e_score_correction_bias=BIAS))
    model.register_buffer("e_score_correction_bias", torch.zeros(4), persistent=False)
    loader_trace.check_coverage(model, recording)


def test_padding_is_filled_with_a_constant_or_declared() -> None:
    shapes = {f"{part}__{kind}": shape for part in "abc" for kind, shape in (("weight", WEIGHT), ("bias", BIAS))}
    model, recording = recorded(**shapes | {"a__weight": (3, 3), "e_score_correction_bias": BIAS})
    loader_trace.check_coverage(model, recording)
    assert [(write.path, write.value) for write in recording.constants] == [("a.weight", 0.0)]
    model.a.weight.weight_loader_numel = 9  # type: ignore[assignment]
    assert loader_trace.record(model, entries(a__weight=(3, 3))).layouts["a.weight"].loaded == 9
    unfilled = dataclasses.replace(recording, constants=())
    with pytest.raises(ValueError, match="a.weight: 3 of 12 elements are never written"):
        loader_trace.check_coverage(model, unfilled)
    declared = dataclasses.replace(recording.layouts["a.weight"], loaded=9)
    layouts = recording.layouts | {"a.weight": declared}
    loader_trace.check_coverage(model, dataclasses.replace(unfilled, layouts=layouts))


def test_a_module_with_one_tensor_of_the_loaders_is_the_loaders() -> None:
    shapes = {"scaled__a__weight": WEIGHT, "a__bias": BIAS, "b__weight": WEIGHT, "b__bias": BIAS, "c__weight": WEIGHT}
    model, recording = recorded(**shapes)
    spec = worker_plan.routes(model, recording, entries(**shapes))
    assert spec.loader == ("scaled.a.weight", "a.bias")
    assert [part.name for part in spec.direct] == ["b.weight", "b.bias", "c.weight"]
    half = [dataclasses.replace(entry, dtype="bfloat16") if entry.name == "b.bias" else entry
            for entry in entries(**shapes)]
    assert worker_plan.routes(model, recording, half).loader == ("scaled.a.weight", "a.bias", "b.weight", "b.bias")
    model.c.weight.data = model.c.weight.data.t().contiguous().t()
    assert worker_plan.routes(model, recording, entries(**shapes)).loader == ("scaled.a.weight", "a.bias", "c.weight")


def test_on_accelerators_all_but_what_is_processed_or_computed_is_direct(saved, monkeypatch):
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.platforms import current_platform

    loader = {}
    for name in ("deepseek-v3", "nemotron-h-latent"):
        folder, tensors = saved[name]
        with tiny.as_rank(folder, Rank(tp=(1, 2))) as config:
            model = tiny.build(config)
            recording = loader_trace.record(model, tiny.entries_of(tensors))
        experts = [module.quant_method for module in model.modules() if isinstance(module, RoutedExperts)]
        backends = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.FLASHINFER_CUTLASS)
        for kind, backend in zip(("kept", "swapped"), backends, strict=True):
            monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
            for method in experts:
                method.unquantized_backend = backend
            spec = worker_plan.routes(model, recording, tiny.entries_of(tensors))
            loader[name, kind] = {key.split(".", 3)[-1] for key in spec.loader}
            monkeypatch.undo()
    assert loader["deepseek-v3", "kept"] == {"self_attn.kv_b_proj.weight"}
    assert loader["deepseek-v3", "swapped"] - loader["deepseek-v3", "kept"] == {
        f"mlp.experts.{expert}.{part}_proj.weight" for expert in range(4) for part in ("gate", "up", "down")}
    assert loader["nemotron-h-latent", "kept"] == {"mixer.A_log", "mixer.D", "mixer.dt_bias"}


def test_tied_embeddings_go_one_way(saved: dict[str, tuple[Path, Tensors]], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    folder, tensors = saved["qwen3-tied"]
    with tiny.as_rank(folder, Rank(tp=(1, 2))) as config:
        model = tiny.build(config)
        recording = loader_trace.record(model, tiny.entries_of(tensors))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert worker_plan.routes(model, recording, tiny.entries_of(tensors)).loader == ()
    model.lm_head.quant_method = torch.nn.Module()
    assert worker_plan.routes(model, recording, tiny.entries_of(tensors)).loader == ("model.embed_tokens.weight",)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_spelling_is_the_one_of_which_every_name_is_taken_somewhere(workers: int) -> None:
    candidates = {
        "language": {"plain": entries(a__weight=WEIGHT, a__bias=BIAS)},
        "images": {"ignored": entries(other__weight=WEIGHT, c__bias=BIAS), "refused": entries(c__odd=WEIGHT),
                   "taken": entries(c__weight=WEIGHT, c__bias=BIAS)}}
    probes = [worker_plan.probe_schemes(Loader(), candidates) for _ in range(workers)]
    assert worker_plan.choose_scheme(probes) == {"language": "plain", "images": "taken"}
    for worker in probes:
        del worker["images"]["taken"]
    with pytest.raises(ValueError, match="images in no naming scheme: as ignored, other.weight are ignored "
                                         "without a word; as refused, c.odd is refused .KeyError"):
        worker_plan.choose_scheme(probes)


@pytest.mark.slow
def test_llavas_loader_chooses_between_two_spellings_of_its_tower(saved: dict[str, tuple[Path, Tensors]]) -> None:
    folder, tensors = saved["llava"]
    tower = [entry for entry in tiny.entries_of(tensors)
             if "tower" in entry.name and "post_layernorm" not in entry.name]
    names = {"short": [dataclasses.replace(entry, name=entry.name.replace("vision_model.", "")) for entry in tower],
             "long": tower}
    with tiny.as_rank(folder, Rank(tp=(0, 2))) as config:
        probes = [worker_plan.probe_schemes(tiny.build(config), {"images": names})]
        assert worker_plan.choose_scheme(probes) == {"images": "long"}


@pytest.mark.slow
def test_a_live_engine_generates_the_same_after_it_was_recorded(saved: dict[str, tuple[Path, Tensors]]) -> None:
    folder, tensors = saved["qwen3-moe"]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        before, after, recording = pool.submit(
            tiny.live_recording, str(folder), tiny.entries_of(tensors)).result(timeout=280)
    assert before == after and len(set(before[0])) > 1
    with tiny.as_rank(folder, Rank()) as config:
        expected = loader_trace.record(tiny.build(config), tiny.entries_of(tensors))
    assert recording.slices == expected.slices and recording.constants == expected.constants
    assert not recording.untaken and not recording.refused and not recording.computed


@pytest.mark.parametrize("scheme", ["first", "last"])
def test_the_first_and_the_last_layer_show_whether_a_scheme_is_taken(scheme: str) -> None:
    """The loader knows no layer but two of the right scheme, so the layers between them are not tried."""
    class Layers(Loader):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                assert name in ("layers.0.weight", "layers.9.weight"), name
                self.c.weight.data.copy_(tensor)

    wrong = {"first": [1, 5, 9], "last": [0, 5, 10]}[scheme]
    candidates = {"language": {
        "wrong": [TensorMeta(f"layers.{layer}.weight", "float32", WEIGHT) for layer in wrong],
        "right": [TensorMeta(f"layers.{layer}.weight", "float32", WEIGHT) for layer in (0, 5, 9)]}}
    assert worker_plan.choose_scheme([worker_plan.probe_schemes(Layers(), candidates)]) == {"language": "right"}
