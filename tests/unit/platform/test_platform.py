"""Choosing, installing and seeding the platform; each test in a process of its own or in a pool's."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT
from tests.support.spawn import WorkerPool


def run_python(code, **environment):
    """Standard output and error of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code],
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_installed_twice_is_one_object_and_one_log_line():
    out = run_python(
        "import logging; logging.basicConfig(level='INFO')\n"
        "import torch\n"
        "from mimo.platform import current_platform, get_platform\n"
        "first = get_platform('cpu'); zeros = torch.zeros\n"
        "import megatron.core, sys\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert get_platform() is get_platform('cpu') is current_platform() is first\n"
        "assert torch.zeros is zeros\n"
        "try: get_platform('cuda')\n"
        "except RuntimeError as error: print(error)\n"
    )
    assert out.count("CPU emulation is on") == 1
    assert "--device cuda: this process already runs on platform 'cpu'" in out


@pytest.mark.slow
def test_emulation_after_megatron_is_an_error():
    out = run_python(
        "import megatron.core\n"
        "from mimo.platform import current_platform, get_platform\n"
        "for call in (lambda: get_platform('cpu'), current_platform):\n"
        "    try: call()\n"
        "    except RuntimeError as error: print(error)\n"
    )
    assert "must be installed before megatron.core is imported" in out
    assert "no platform is installed" in out


def test_device_flag():
    out = run_python(
        "from mimo.platform import get_platform\n"
        "for device in ('tpu', 'cuda'):\n"
        "    try: get_platform(device)\n"
        "    except ValueError as error: print(error)\n"
        "print(get_platform().name)\n",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "--device 'tpu' is not one of auto, cuda, cpu" in out
    assert "--device cuda: torch finds no CUDA device here" in out
    assert out.splitlines()[-1] == "cpu"


def compiled_fusions(rank):
    import torch
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
    from megatron.core.jit import jit_fuser

    def double(x):
        return 2 * x

    out = bias_swiglu_impl(torch.ones(2, 1, 4), None)
    return jit_fuser(double) is double, tuple(out.shape), os.environ["TORCHDYNAMO_DISABLE"]


@pytest.mark.slow
def test_megatron_fusions_are_not_compiled(pool):
    assert pool.run(compiled_fusions) == [(True, (2, 1, 2), "1")] * 2


def answers(rank):
    from mimo.platform import current_platform

    platform = current_platform()
    platform.set_device(rank)
    platform.synchronize()
    return platform.name, platform.backend, str(platform.device), platform.has_transformer_engine()


def test_cpu_platform_answers(pool):
    assert pool.run(answers) == [("cpu", "gloo", "cpu", False)] * 2


def peaks(rank):
    import torch

    from mimo.platform import current_platform

    platform = current_platform()
    platform.reset_peak_memory()
    before = platform.peak_memory_bytes()
    torch.ones(50_000_000)
    return platform.peak_memory_bytes() - before


@pytest.mark.slow
def test_peak_memory_sees_a_freed_tensor():
    large = bytearray(b"x" * 1_500_000_000)  # of the process that starts it, whose size is not its own
    with contextlib.closing(WorkerPool(1)) as pool:
        (growth,) = pool.run(peaks)
    assert growth > 150e6 and large  # 200 MB were held for a moment


def draws(rank, seed, tp_rank, ep_rank, expt_tp_rank, restore=False):
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

    from mimo.platform import current_platform

    def draw():
        tracker = get_cuda_rng_tracker()
        plain = [random.random(), float(np.random.rand()), float(torch.rand(1)), float(torch.rand(1, device="cuda"))]
        with tracker.fork():
            model_parallel = float(torch.rand(1))
        with tracker.fork(get_expert_parallel_rng_tracker_name()):
            expert = float(torch.rand(1))
        return plain, model_parallel, expert

    platform = current_platform()
    platform.seed(seed, tp_rank=tp_rank, ep_rank=ep_rank, expt_tp_rank=expt_tp_rank)
    first = draw()
    if not restore:
        return first
    state = platform.rng_state()
    second = draw()
    platform.set_rng_state(state)
    assert draw() == second != first
    return second


def test_seeding(pool):
    (plain, model_parallel, expert), again = pool.run(draws, 5, 0, 0, 0)
    assert again == (plain, model_parallel, expert)
    tp_rank_1, _ = pool.run(draws, 5, 1, 0, 0)
    assert tp_rank_1[0] == plain and tp_rank_1[1] != model_parallel and tp_rank_1[2] == expert
    for ep_rank, expt_tp_rank in ((1, 0), (0, 1)):
        expert_rank, _ = pool.run(draws, 5, 0, ep_rank, expt_tp_rank)
        assert expert_rank[:2] == (plain, model_parallel) and expert_rank[2] != expert
    other, _ = pool.run(draws, 6, 0, 0, 0)
    assert all(ours != theirs for ours, theirs in zip(plain, other[0], strict=True))
    first, second = pool.run(draws, 5, 0, 0, 0, True)
    assert first == second


def negative_seed(rank):
    from mimo.platform import current_platform

    with pytest.raises(ValueError, match="--seed -1"):
        current_platform().seed(-1, tp_rank=0, ep_rank=0, expt_tp_rank=0)


def test_negative_seed_is_refused(pool):
    pool.run(negative_seed)


def exchange(rank, nccl):
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1], backend="nccl" if nccl else None)
    sent = torch.arange(3.0, device="cuda") + 10 * rank
    splits_in = torch.tensor([1, 2] if rank == 0 else [2, 1])
    splits_out = torch.tensor([1, 2] if rank == 0 else [2, 1])
    received = torch.empty(3)
    dist.all_to_all_single(received, sent, splits_out, splits_in, group=group)
    return dist.get_backend(group), received.tolist()


def test_all_to_all_with_split_sizes_as_tensors(pool):
    assert pool.run(exchange, True) == [("gloo", [0, 10, 11]), ("gloo", [1, 2, 12])]


def exchange_uneven_rows(rank):
    import torch
    import torch.distributed as dist

    rows = [1, 3]
    parts = [torch.zeros(count, 2) for count in rows]
    dist.all_gather(parts, torch.full((rows[rank], 2), 10.0 + rank))
    mine = torch.zeros(rows[rank], 2)
    dist.reduce_scatter(mine, [part * (rank + 1) for part in parts])
    return [part.tolist() for part in parts], mine.tolist()


def test_gather_and_reduce_scatter_of_uneven_rows(pool):
    for rank, (parts, mine) in enumerate(pool.run(exchange_uneven_rows)):
        assert parts == [[[10, 10]], [[11, 11]] * 3]
        assert mine == [[[30, 30]], [[33, 33]] * 3][rank]


def recompute(rank):
    import torch
    from megatron.core import tensor_parallel

    from mimo.platform import current_platform

    current_platform().seed(3, tp_rank=rank, ep_rank=0, expt_tp_rank=0)
    weight = torch.randn(8, 8, requires_grad=True)

    def layer(x):
        x = torch.nn.functional.dropout(x @ weight, 0.5)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x, 0.5)

    gradients = []
    for checkpointed in (False, True):
        current_platform().seed(3, tp_rank=rank, ep_rank=0, expt_tp_rank=0)
        x = torch.randn(4, 8, requires_grad=True)
        out = tensor_parallel.checkpoint(layer, False, x) if checkpointed else layer(x)
        weight.grad = None
        out.square().sum().backward()
        gradients.append((out.detach(), x.grad, weight.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))
    assert gradients[0][0].ne(0).any()
    return torch.rand(1).item()


def test_recomputed_dropout_repeats_its_masks(pool):
    pool.run(recompute)


def test_cuda_platform_wants_a_gpu_for_each_local_rank(monkeypatch):
    import torch

    from mimo.platform.cuda import CudaPlatform

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="LOCAL_RANK 2 .* has 2"):
        CudaPlatform().set_device(2)


@pytest.mark.parametrize("module", ["mimo.training.run", "mimo.rl.run", "scripts.bench.run_series"])
def test_programs_install_the_platform_before_they_import_megatron_core(module):
    code = f"import sys, {module}; assert 'megatron.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_compiled_kernels_are_kept_where_the_user_says_or_in_the_cache(tmp_path, monkeypatch):
    from mimo.platform.cuda import keep_compiled_kernels
    from mimo.rl.placement import forwarded

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/chosen"
    chosen = tmp_path / "mimo-hetero" / platform.node() / "mimo-hetero-inductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(chosen)
    engines = forwarded({"TRITON_CACHE_DIR": "/chosen", "TORCHINDUCTOR_CACHE_DIR": str(chosen)})
    assert engines == {"TRITON_CACHE_DIR": "/chosen"}, "the trainer's own folder is for its own host"
    (tmp_path / "file").touch()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_kernels()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize(("given", "expected"), [(None, "0"), ("1", "1")])
def test_nccl_registers_no_buffers_of_graphs_unless_the_user_asks_for_it(monkeypatch, given, expected):
    from mimo.platform import cuda

    monkeypatch.setenv("NCCL_GRAPH_REGISTER", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    for name in ("keep_compiled_kernels", "choose_pinned_memory"):
        monkeypatch.setattr(cuda, name, lambda: None)
    monkeypatch.setattr(cuda.flight_recorder, "turn_on", lambda: None)
    cuda.CudaPlatform().install()
    assert os.environ["NCCL_GRAPH_REGISTER"] == expected


@pytest.mark.parametrize(("name", "given", "expected"), [
    ("PYTORCH_ALLOC_CONF", "", "{ours}"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True",
                                           "{ours},expandable_segments:True"),
    ("PYTORCH_ALLOC_CONF", "pinned_num_register_threads:4", "{ours},pinned_num_register_threads:4"),
    ("PYTORCH_ALLOC_CONF", "pinned_use_cuda_host_register:False", "pinned_use_cuda_host_register:False"),
])
def test_settings_of_the_allocator_that_the_user_chose_stay(monkeypatch, name, given, expected):
    from mimo.platform.cuda import PINNED_MEMORY, choose_pinned_memory

    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, given)
    choose_pinned_memory()
    assert os.environ[name] == expected.format(ours=PINNED_MEMORY)
    choose_pinned_memory()
    assert os.environ[name].count("pinned_use") == 1


def test_settings_of_the_allocator_are_added_to_the_variable_that_torch_reads():
    program = ("import os; from mimo.platform.cuda import choose_pinned_memory; choose_pinned_memory(); import torch; "
               "print(torch._C._accelerator_getAllocatorSettings())")
    for given in ("", "expandable_segments:True"):
        out = run_python(program, PYTORCH_ALLOC_CONF="max_split_size_mb:64", PYTORCH_CUDA_ALLOC_CONF=given)
        assert "pinned_use_cuda_host_register:True" in out and given in out


# Shows its own deprecations, as Transformer Engine does.
ENGINE = """
import warnings
warnings.filterwarnings("module", category=DeprecationWarning, module="transformer")
def attention():
    warnings.warn("Relying on pointer-based detection of packed layouts is deprecated", DeprecationWarning)
    warnings.warn("something else is deprecated", DeprecationWarning)
"""
ATTENDS = """
from mimo.platform import quieten_transformer_engine, quieten_megatron
quieten_megatron()
import transformer_engine.pytorch
quieten_transformer_engine()
transformer_engine.pytorch.attention()
"""


def said(folder: Path, *options: str) -> str:
    package = folder / "transformer_engine"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text(ENGINE)
    script = f"import sys; sys.path.insert(0, {str(folder)!r})\n{ATTENDS}"
    return subprocess.run([sys.executable, *options, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          check=True).stderr


@pytest.mark.slow
def test_megatron_cores_warnings_about_transformer_engine_are_not_shown(tmp_path: Path) -> None:
    shown = said(tmp_path)
    assert "something else" in shown and "pointer-based" not in shown
    assert "pointer-based" in said(tmp_path, "-W", "default")


IMPORTS = """
import sys
from mimo.platform import get_platform
from mimo.platform import import_megatron
get_platform("cpu")
import_megatron()
assert "megatron.core" in sys.modules
assert not {"multistorageclient", "wandb", "torch.utils.tensorboard"} & set(sys.modules)
import megatron.core.timers
assert megatron.core.timers.wandb is None
import torch.utils.tensorboard
import multistorageclient
import_megatron()
assert sys.modules["multistorageclient"] is multistorageclient
from megatron.core.msc_utils import MultiStorageClientFeature
assert not MultiStorageClientFeature.is_enabled()
"""


@pytest.mark.slow
def test_megatron_core_comes_without_packages_of_others():
    """Nothing here lets it use them. Others can import them afterwards."""
    run_python(IMPORTS)
