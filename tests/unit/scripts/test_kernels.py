"""Figures that scripts/bench/kernels.py reads from a trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import kernels

# Names as traces of an H200 have them.
NAMES = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "matrix products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
    "void transformer_engine::normalization::rmsnorm_fwd_general_kernel<transformer_engine": "norms",
    "void multi_tensor_apply_kernel<TensorListMetadata<4, false>, transformer_engine::multi_tensor_adam::": "optimizer",
    "triton_poi_fused_add_cat_mul_rsub_sigmoid_silu_split_0": "activations",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>": "other elementwise",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
    "Memcpy HtoD (Pinned -> Device)": "copies and memset",
    "cross_entropy_forward_kernel": "cross entropy",
}


def kernel(name: str, begin: float, length: float, correlation: int, kind: str = "kernel") -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": begin, "dur": length, "args": {"correlation": correlation}}


def launch(correlation: int, moment: float) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": moment, "dur": 1,
            "pid": 1, "tid": 2, "args": {"correlation": correlation}}


def span(name: str, begin: float, length: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": name, "ts": begin, "dur": length}


# Launched in a forward pass inside a step, in the next microbatch's, and outside both; two overlap on other streams.
EVENTS = [span("step", 0, 400), span("language stage 0 forward microbatch 0", 100, 50),
          span("language stage 0 forward microbatch 1", 200, 50), launch(1, 110), launch(2, 210), launch(3, 450),
          kernel("nvjet_x", 1000, 300, 1), kernel("nvjet_x", 1200, 400, 2),
          kernel("Memset (Device)", 2000, 100, 3, "gpu_memset"),
          {"cat": "cpu_op", "name": "aten::mm", "ts": 109, "dur": 6, "pid": 1, "tid": 2},
          {"cat": "cpu_op", "name": "aten::item", "ts": 100, "dur": 900, "pid": 1, "tid": 3}]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_kinds_are_told_by_names(name: str, kind: str) -> None:
    assert kernels.kind_of(name) == kind


def test_time_is_told_by_kind_and_by_part() -> None:
    found = kernels.figures(EVENTS, top=1)
    assert found["window_ms"] == pytest.approx(1.1)
    assert found["busy_ms"] == pytest.approx(0.7), "what overlaps counts once"
    assert found["idle_ms"] == pytest.approx(0.4)
    assert found["kinds"] == {"matrix products": {"ms": pytest.approx(0.7), "kernels": 2},
                              "copies and memset": {"ms": pytest.approx(0.1), "kernels": 1}}
    forward, outside = found["parts"]["language stage 0 forward"], found["parts"]["outside the passes"]
    assert (forward["ms"], forward["kernels"]) == (pytest.approx(0.7), 2), "both microbatches, by their launches"
    assert outside["kinds"] == {"copies and memset": pytest.approx(0.1)}
    assert (forward["idle_before_ms"], outside["idle_before_ms"]) == (0, pytest.approx(0.4))
    assert list(found["longest"]) == ["nvjet_x"]


def test_an_operation_of_the_host_has_its_own_time_without_what_it_calls() -> None:
    (thread,) = kernels.figures(EVENTS, top=5)["host"]
    assert thread["launches"] == 3, "the thread that launches nothing is left out"
    assert thread["operations"] == {"aten::mm": {"ms": pytest.approx(0.005), "calls": 1},
                                    "cudaLaunchKernel": {"ms": pytest.approx(0.003), "calls": 3}}
    assert thread["busy_ms"] == pytest.approx(0.008)
    assert thread["python_ms"] == pytest.approx(0.9 - 0.008), "another thread worked until then"


def test_a_table_and_then_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([str(write(tmp_path / "rank-0.json.gz", EVENTS))]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0] == "window 1.1 ms, busy 0.7 ms, idle 0.4 ms (36.4 %)"
    assert "| matrix products | 0.70 | 63.6 | 2 |" in lines
    assert "| outside the passes | 0.10 | 9.1 | 1 | 0.40 |" in lines
    assert json.loads(last)["busy_ms"] == pytest.approx(0.7)


@pytest.mark.parametrize(("text", "message"), [(None, "No such file"), ("{", "is not a trace of torch's profiler"),
                                               ('{"a": 1}', "is not a trace of torch's profiler"),
                                               ('{"traceEvents": []}', "the trace has no kernels of a GPU")])
def test_a_file_without_a_gpu_trace_is_one_error(tmp_path, capsys, text, message):
    path = tmp_path / "rank-0.json"
    if text is not None:
        path.write_text(text)
    assert kernels.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
