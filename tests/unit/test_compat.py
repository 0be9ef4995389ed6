"""The private parts of other packages that compat modules use are there; a name that fails is what an upgrade took."""

from __future__ import annotations

import importlib
import pickle
import signal

import pytest
import torch

from data.energon import compat as energon
from mimo import compat as shared
from mimo.model import compat as model
from mimo.refit import compat as refit
from mimo.training import compat as training

OVERRIDDEN = {**model.OVERRIDDEN, **training.OVERRIDDEN, **energon.OVERRIDDEN}


@pytest.mark.parametrize("path", OVERRIDDEN)
def test_overridden_methods_are_there(path):
    module, _, name = path.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    assert [method for method in OVERRIDDEN[path] if not callable(getattr(owner, method, None))] == []


def test_checkpoints_find_what_they_need():
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy

    from mimo.checkpoint import compat

    assert callable(compat.split_into_files) and compat.StorageInfo("file", 0, 1).length == 1
    for name in ("_replace_state_dict_keys_with_sharded_keys", "_unwrap_pyt_sharded_tensor",
                 "_replace_sharded_keys_with_state_dict_keys", "_restore_dict_types"):
        assert callable(getattr(torch_strategy, name)), name


def test_models_find_what_they_replace():
    from megatron.core.models.mimo.config.role import RankRole
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_layer import TransformerLayer

    assert callable(RankRole._from_grid_map) and callable(mamba_mixer._check_mamba_sequence_packing_support)
    assert callable(MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize)
    assert all(map(callable, model.parts_of_layer(TransformerLayer))) and model.has_parts(
        object.__new__(TransformerLayer))
    assert all(map(callable, (model.rotary_of_packed_rows, model.rotary_of_rows, model.rotate_half,
                              model.apply_expert_bias)))


def test_the_optimizer_finds_what_it_needs():
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    assert callable(DistributedOptimizer._get_model_param_range_map)
    assert callable(DistributedOptimizer._filter_grads_for_norm)


def test_rows_of_worker_processes_are_followed_and_ended():
    handler = signal.getsignal(signal.SIGCHLD)
    rows = iter(torch.utils.data.DataLoader([1, 2, 3, 4], batch_size=None, num_workers=2,
                                            multiprocessing_context="fork"))
    signal.signal(signal.SIGCHLD, handler)  # torch's own raises in tests that come later
    processes = energon.worker_processes(rows)
    assert [(energon.next_worker(rows), next(rows)) for _ in range(3)] == [(0, 1), (1, 2), (0, 3)]
    energon.ask_to_end(rows)
    for process in processes:
        process.join(60)
    energon.release(rows)
    assert [process.exitcode for process in processes] == [0, 0]


def test_the_compiler_is_not_told_of_every_traced_operation():
    from torch.utils._python_dispatch import TorchDispatchMode

    assert TorchDispatchMode._should_skip_dynamo() and not refit.TracingMode._should_skip_dynamo()

    class Mode(refit.TracingMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    assert not hasattr(Mode.__torch_dispatch__, "__wrapped__")


def test_operations_are_untraced_only_within_the_context():
    seen = []

    class Mode(refit.TracingMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    select, fill = torch.ops.aten.select.int, torch.ops.aten.fill_.Scalar
    tensor = torch.zeros(2, 2)
    with Mode():
        with refit.untraced([select, torch.ops.aten.as_strided.default]):  # which `select` calls
            tensor[0].fill_(1.0)
        tensor[1].fill_(2.0)
    assert seen == [fill, select, fill]
    assert tensor.tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_operations_say_what_they_change():
    assert refit.changed_arguments(torch.ops.aten.copy_.default) == ((0, "self"),)
    assert refit.changed_arguments(refit.TO_COPY) == ()
    assert refit.returns_something(torch.ops.aten.copy_.default)


def test_storages_are_told_apart_without_memory():
    one, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert shared.storage_key(one) == shared.storage_key(one[1:].untyped_storage()) != shared.storage_key(other)


def test_torch_records_without_stacks():
    assert callable(torch._C._distributed_c10d._dump_nccl_trace)
    assert isinstance(pickle.loads(shared.flight_record("gloo")), dict)


def test_tables_of_a_module_are_its_own():
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    parameters, buffers, not_saved = refit.module_tables(module)
    buffers["running_mean"] = torch.full((2,), 7.0)
    parameters.clear()
    assert module.running_mean.tolist() == [7.0, 7.0] and not list(module.parameters()) and not_saved == {"scratch"}
