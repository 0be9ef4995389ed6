"""Every CUDA call that the CPU emulation maps is made once, in another process."""

import time
import traceback

import pytest
import torch
import torch.distributed as dist

from mimo.platform.cpu import MAPPED_CALLS

FACTORY_ARGUMENTS = {"arange": (4,), "as_tensor": ([1, 2],), "asarray": ([1, 2],), "empty": (2, 3),
                     "empty_strided": ((2, 3), (3, 1)), "eye": (3,), "full": ((2,), 7), "linspace": (0, 1, 5),
                     "ones": (2,), "rand": (2,), "randint": (5, (3,)), "randn": (2,), "randperm": (4,),
                     "scalar_tensor": (1.5,), "tensor": ([1.0, 2.0],), "tril_indices": (3, 3), "triu_indices": (3, 3),
                     "zeros": (2,)}
NEW_METHOD_ARGUMENTS = {"new_empty": ((2,),), "new_empty_strided": ((2, 2), (2, 1)), "new_full": ((2,), 3.0),
                        "new_ones": ((2,),), "new_tensor": ([1.0],), "new_zeros": ((2,),)}


def check_factory(name):
    if name.endswith("_like"):
        arguments = (torch.ones(2), *((5,) if name in ("full_like", "randint_like") else ()))
    else:
        arguments = FACTORY_ARGUMENTS[name]
    factory = getattr(torch, name)
    for device in ("cuda", "cuda:0", 0, torch.device("cuda", 0), torch.cuda.current_device()):
        assert factory(*arguments, device=device).device.type == "cpu"
    assert factory(*arguments).device.type == "cpu"
    assert factory(*arguments, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert factory(*arguments).device.type == ("cpu" if name.endswith("_like") else "meta")
    if name in ("empty", "zeros", "tensor", "ones", "full", "arange", "rand", "randn"):
        assert not factory(*arguments, pin_memory=True).is_pinned()


def check_new_method(name):
    method = getattr(torch.ones(2), name)
    assert method(*NEW_METHOD_ARGUMENTS[name], device="cuda").device.type == "cpu"
    assert method(*NEW_METHOD_ARGUMENTS[name]).dtype == torch.float32


def check_to():
    x = torch.ones(2)
    assert x.to("cuda").device == x.to(torch.cuda.current_device()).device == x.to(0).device == torch.device("cpu")
    moved = x.to(device="cuda", dtype=torch.bfloat16, non_blocking=True)
    assert (moved.device.type, moved.dtype) == ("cpu", torch.bfloat16)
    assert x.to("cuda", torch.float64).dtype == x.to(torch.float64).dtype == torch.float64
    assert torch.nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"


def check_type():
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16)).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


def check_same_tensor(name):
    x = torch.ones(2)
    assert getattr(x, name)() is x
    if name == "cuda":
        assert x.cuda(torch.cuda.current_device(), non_blocking=True) is x


def check_record_stream():
    assert torch.ones(1).record_stream(torch.cuda.current_stream()) is None


def check_module_cuda():
    module = torch.nn.Linear(2, 2)
    assert module.cuda() is module


def check_device():
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == torch.device("cpu")
    torch.cuda.set_device(0)
    torch.cuda.init()
    torch.cuda._lazy_init()
    assert torch.cuda.get_device_name() == "cpu"
    assert torch.cuda.get_device_capability() == (0, 0)
    assert torch.cuda.get_device_properties(0).total_memory > 0
    assert torch.cuda.is_bf16_supported()
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        pass
    called = []
    torch.cuda._lazy_call(lambda: called.append(1))
    assert called == [1]


def check_streams():
    stream = torch.cuda.Stream(device=torch.cuda.current_device(), priority=-1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start.record(stream)
        time.sleep(0.02)
    stream.record_event(end)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.default_stream().wait_event(end)
    torch.cuda.set_stream(stream)
    stream.synchronize()
    end.synchronize()
    end.wait(stream)
    assert end.query() and stream.query() and torch.cuda.ExternalStream(0).cuda_stream == 0
    assert stream.priority_range() == (0, 0)
    assert start.elapsed_time(end) >= 20  # milliseconds: it slept that long
    with pytest.raises(RuntimeError, match="recorded"):
        torch.cuda.Event().elapsed_time(end)
    assert torch.cuda.current_stream() is torch.cuda.current_stream() is not stream
    assert not torch.cuda.is_current_stream_capturing()


def check_generators():
    torch.cuda.manual_seed(7)
    first = torch.rand(3)
    torch.cuda.manual_seed_all(7)
    assert torch.equal(torch.rand(3), first)
    for module in (torch.cuda, torch.cuda.random):
        state = module.get_rng_state(device="cuda")
        drawn = torch.rand(3)
        module.set_rng_state(state, 0)
        assert torch.equal(torch.rand(3), drawn)
    assert torch.cuda.default_generators[0] is torch.default_generator
    assert list(torch.cuda.default_generators) == [torch.default_generator] and len(torch.cuda.default_generators) == 1


def check_memory():
    before = torch.cuda.memory_allocated()
    assert before > 1e6
    kept = torch.ones(40_000_000)  # 160 MB
    assert torch.cuda.memory_allocated() - before > 100e6
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() - 1e6
    assert torch.cuda.memory_reserved() > before and torch.cuda.max_memory_reserved() > before
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["reserved_bytes.all.current"] - 1e6 > 0
    del kept
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() - 1e6


def check_profiling():
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.mark("here")
    with torch.cuda.nvtx.range("step"):
        pass
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()


def check_groups():
    from torch.distributed import distributed_c10d

    for group in (dist.new_group([0], backend="nccl"), dist.new_group([0], None, "cpu:gloo,cuda:nccl", object()),
                  distributed_c10d.new_group([0], backend="nccl"), dist.new_group([0]),
                  dist.new_subgroups_by_enumeration([[0]], backend="nccl")[0]):
        assert dist.get_backend(group) == "gloo"
    dist.destroy_process_group()
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    assert dist.get_backend() == "gloo"


def check_all_to_all():
    received, splits = torch.zeros(3), torch.tensor([3])
    dist.all_to_all_single(received, torch.arange(3.0), splits, splits)
    assert received.tolist() == [0, 1, 2]


def check_uneven_rows():
    part, parts = torch.arange(6.0).view(3, 2), [torch.zeros(3, 2)]
    dist.all_gather(parts, part)
    assert torch.equal(parts[0], part)
    received = torch.zeros(3, 2)
    dist.reduce_scatter(received, [part])
    assert torch.equal(received, part)


def check_compile():
    def double(x):
        return 2 * x

    assert torch.compile(double) is double and torch.compile(mode="max-autotune")(double) is double
    assert torch.compiler.disable(double) is double and torch.compiler.disable(recursive=False)(double) is double


def check_optimizer():
    import sys


    # Other tests of this process may have imported it.
    had_compiler = "torch._dynamo" in sys.modules
    for make in (torch.optim.Adam, torch.optim.SGD):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = make([parameter], lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            parameter.sum().backward()
            assert parameter.grad.tolist() == [1, 1]
            optimizer.step()  # an update in place, which a parameter refuses where gradients are recorded
            optimizer.load_state_dict(optimizer.state_dict())
        assert torch.allclose(parameter.detach(), torch.zeros(2), atol=1e-6) and torch.is_grad_enabled()
    assert ("torch._dynamo" in sys.modules) == had_compiler


CHECKS = {
    "torch.Tensor.to": check_to,
    "torch.Tensor.type": check_type,
    "torch.Tensor.cuda": check_same_tensor,
    "torch.Tensor.pin_memory": check_same_tensor,
    "torch.Tensor.record_stream": check_record_stream,
    "torch.nn.Module.cuda": check_module_cuda,
    "torch.compile": check_compile,
    "torch.compiler.disable": check_compile,
    **dict.fromkeys([f"torch.optim.Optimizer.{name}" for name in
                     ("add_param_group", "load_state_dict", "state_dict", "zero_grad")], check_optimizer),
    **dict.fromkeys(["torch.optim.Adam.step", "torch.optim.SGD.step"], check_optimizer),
    "torch.distributed.all_to_all_single": check_all_to_all,
    "torch.distributed.all_gather": check_uneven_rows,
    "torch.distributed.reduce_scatter": check_uneven_rows,
    **dict.fromkeys(
        ["torch.distributed.init_process_group", "torch.distributed.new_group",
         "torch.distributed.distributed_c10d.new_group", "torch.distributed.new_subgroups_by_enumeration"],
        check_groups,
    ),
}
CUDA_CHECKS = {
    check_device: "is_available device_count current_device set_device get_device_name get_device_capability "
    "get_device_properties is_bf16_supported init _lazy_init _lazy_call device synchronize",
    check_streams: "Stream ExternalStream Event current_stream default_stream set_stream stream "
    "is_current_stream_capturing",
    check_generators: "default_generators get_rng_state set_rng_state random.get_rng_state random.set_rng_state "
    "manual_seed manual_seed_all",
    check_memory: "empty_cache memory_allocated memory_reserved max_memory_allocated max_memory_reserved memory_stats "
    "reset_peak_memory_stats",
    check_profiling: "nvtx.range_push nvtx.range_pop nvtx.range nvtx.mark profiler.start profiler.stop",
}
for check, names in CUDA_CHECKS.items():
    CHECKS.update(dict.fromkeys([f"torch.cuda.{name}" for name in names.split()], check))


def exercise(name):
    """Run the check of a mapped call; returns how often it called it."""
    from mimo.platform.cpu import resolve

    owner, attribute = resolve(name)
    replacement = getattr(owner, attribute)
    calls = []

    def counted(*args, **kwargs):
        calls.append(name)
        return replacement(*args, **kwargs)

    if callable(replacement):
        setattr(owner, attribute, counted)
    else:
        calls.append(name)  # default_generators, a container
    try:
        if name in CHECKS:
            check = CHECKS[name]
            check(attribute) if check is check_same_tensor else check()
        elif attribute in NEW_METHOD_ARGUMENTS:
            check_new_method(attribute)
        else:
            check_factory(attribute)
    finally:
        setattr(owner, attribute, replacement)
    return len(calls)


def failures(rank):
    """Return why each mapped call failed its check, for those that did."""
    found = {}
    # What must not import torch's compiler comes before what does.
    for name in sorted(MAPPED_CALLS, key=lambda name: (not name.startswith("torch.optim"), name)):
        try:
            if exercise(name) == 0:
                found[name] = "its check does not call it"
        except Exception:  # every kind of failure is reported with the call's name
            found[name] = traceback.format_exc()
    return found


def test_every_mapped_call_does_on_a_cpu_what_its_check_says(pool):
    (found,) = pool.run(failures, world_size=1)
    assert found == {}
