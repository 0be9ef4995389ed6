"""Training with CUDA graphs of the decoder, against the same training without them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.launch import records, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
              pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
              pytest.mark.timeout(580)]

SHARED = """--device cuda --bf16 --transformer-impl transformer_engine --vocab-size 512 --hidden-size 256
--num-attention-heads 4 --num-query-groups 2 --max-position-embeddings 512 --dataset-provider mock --mock-min-length 100
--mock-max-length 400 --seq-length 512 --row-lengths 4 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3
--lr-decay-style constant --train-iters 10 --num-generations 0 --log-interval 1 --eval-interval 5 --eval-iters 1
--watchdog-timeout-s 200""".split()
TEXT = ("--mock-text-only-fraction", "1")
EXPERTS = """--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 128 --moe-gemm packed --moe-router-fusion
--moe-aux-loss-coeff 0.01""".split()
DENSE = ("--model-provider", "llava", "--num-layers", "3", "--ffn-hidden-size", "512", "--vision-num-layers", "2",
         "--vision-hidden-size", "64", "--vision-num-attention-heads", "2", "--vision-ffn-hidden-size", "128",
         "--vision-image-size", "112", "--image-token-id", "511", "--mock-images-max", "2", "--mock-max-length", "350")
HYBRID = ("--model-provider", "nemotron_h", "--kv-channels", "64", "--mamba-num-heads", "8", "--mamba-head-dim", "64",
          "--mamba-num-groups", "2", "--mamba-state-dim", "32", "--moe-shared-expert-intermediate-size", "128", *TEXT,
          *EXPERTS)
STATIC = ("--moe-token-dispatcher-type", "allgather", "--row-lengths", "1", "--moe-static-rows")
SPLIT_EXPERTS = ("--model-provider", "causal_lm", "--num-layers", "4", "--qk-layernorm", *TEXT, *EXPERTS, "--llm-ep",
                 "2")
# name -> (ranks, flags)
CASES = {
    "dense": (1, (*DENSE, "--layout", "colocated", "--encoder-window", "2")),
    "dense-frozen-language": (1, (*DENSE, "--layout", "colocated", "--freeze", "vision,language")),
    "experts": (1, ("--model-provider", "causal_lm", "--num-layers", "2", "--qk-layernorm", *TEXT, *EXPERTS)),
    # Most lengths are no multiple of 128, which cuDNN up to 9.15.0 cannot capture.
    "odd-lengths": (1, ("--model-provider", "causal_lm", "--num-layers", "2", *TEXT, *EXPERTS, "--row-lengths", "16")),
    "recomputed": (1, (*DENSE, "--layout", "colocated", "--recompute", "full", "--recompute-num-layers", "2")),
    "experts-recomputed": (1, ("--model-provider", "causal_lm", "--num-layers", "2", "--qk-layernorm", *TEXT, *EXPERTS,
                               "--recompute", "full")),
    "fp8": (1, (*DENSE, "--layout", "colocated", "--fp8-format", "hybrid")),
    "fp8-blockwise": (1, (*DENSE, "--layout", "colocated", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise")),
    "fp8-tp2": (2, (*DENSE, "--layout", "colocated", "--encoder-dp", "2", "--llm-tp", "2", "--sequence-parallel",
                    "--fp8-format", "hybrid")),
    "fp8-pp2": (2, (*DENSE, "--layout", "colocated", "--encoder-dp", "2", "--llm-pp", "2", "--llm-pp-layout", "1,2",
                    "--micro-batch-size", "1", "--fp8-format", "hybrid")),
    "fp8-dp2-overlap": (2, (*DENSE, "--layout", "homogeneous", "--llm-dp", "2", "--overlap-grad-reduce",
                            "--overlap-param-gather", "--ddp-num-buckets", "3", "--fp8-format", "hybrid")),
    "fp8-experts": (1, ("--model-provider", "causal_lm", "--num-layers", "2", "--qk-layernorm", *TEXT, *EXPERTS,
                        "--fp8-format", "hybrid")),
    "experts-ep2": (2, (*SPLIT_EXPERTS, "--llm-dp", "2")),
    "experts-ep2-recomputed": (2, (*SPLIT_EXPERTS, "--llm-dp", "2", "--recompute", "selective", "--recompute-modules",
                                   "moe")),
    "experts-ep2-overlap": (2, (*SPLIT_EXPERTS, "--llm-dp", "2", "--overlap-grad-reduce", "--overlap-param-gather",
                                "--ddp-num-buckets", "3")),
    "experts-ep2-tp2": (2, (*SPLIT_EXPERTS, "--llm-tp", "2", "--sequence-parallel")),
    "experts-ep2-pp2": (4, (*SPLIT_EXPERTS, "--llm-dp", "2", "--llm-pp", "2", "--micro-batch-size", "1")),
    "gathered-experts-ep2": (2, (*SPLIT_EXPERTS, "--llm-dp", "2", "--moe-token-dispatcher-type", "allgather",
                                 "--row-lengths", "1")),
    "static-rows-ep2": (2, (*SPLIT_EXPERTS, "--llm-dp", "2", *STATIC)),
    "static-rows-ep2-tp2": (2, (*SPLIT_EXPERTS, "--llm-tp", "2", "--sequence-parallel", *STATIC)),
    "fp8-static-rows-ep2": (2, (*SPLIT_EXPERTS, "--llm-dp", "2", "--fp8-format", "hybrid", *STATIC)),
    "packed-static-rows-ep2": (2, (*SPLIT_EXPERTS, "--llm-dp", "2", "--mock-packed-length", "512", "--micro-batch-size",
                                   "1", *STATIC)),
    "fp8-experts-ep2": (2, (*SPLIT_EXPERTS, "--llm-dp", "2", "--fp8-format", "hybrid")),
    "packed-experts-ep2": (2, (*SPLIT_EXPERTS, "--llm-dp", "2", "--mock-packed-length", "512", "--micro-batch-size",
                               "1")),
    "hybrid": (1, (*HYBRID, "--hybrid-layer-pattern", "MEM*E")),
    "hybrid-ep2": (2, (*HYBRID, "--hybrid-layer-pattern", "MEM*E", "--llm-dp", "2", "--llm-ep", "2")),
    "hybrid-packed": (1, (*HYBRID, "--hybrid-layer-pattern", "MEM*E", "--mock-packed-length", "512",
                          "--micro-batch-size", "1")),
    "hybrid-pp2": (2, (*HYBRID, "--hybrid-layer-pattern", "MEM*MEM*", "--llm-pp", "2", "--micro-batch-size", "1")),
    "tp2": (2, (*DENSE, "--layout", "colocated", "--encoder-dp", "2", "--encoder-window", "2", "--llm-tp", "2",
                "--sequence-parallel")),
    "pp2": (2, (*DENSE, "--layout", "colocated", "--encoder-dp", "2", "--llm-pp", "2", "--llm-pp-layout", "1,2",
                "--micro-batch-size", "1")),
    "dp2-overlap": (2, (*DENSE, "--layout", "homogeneous", "--llm-dp", "2", "--overlap-grad-reduce",
                        "--overlap-param-gather", "--ddp-num-buckets", "3")),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_without_graphs(tmp_path: Path, case: str) -> None:
    ranks, flags = CASES[case]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    found, peaks = {}, {}
    for name, further in (("plain", ()), ("graphs", ("--cuda-graphs",))):
        done = torchrun(ranks, *SHARED, *flags, *further, "--run-dir", str(tmp_path / name), NCCL_NVLS_ENABLE="0")
        assert done.returncode == 0, done.stdout[-4000:]
        assert ("CUDA graphs of" in done.stdout) == bool(further), done.stdout[-2000:]
        steps = [record for record in records(tmp_path / name) if "lm loss" in record]
        found[name] = [(record["lm loss"], record["grad-norm"]) for record in steps]
        peaks[name] = steps[-1]["peak-memory-bytes/language"]
    print(case, found, peaks)
    assert len(found["plain"]) == 10
    np.testing.assert_allclose(found["graphs"], found["plain"], rtol=2e-3)
    # The allocator takes the memory of replays to be free.
    assert peaks["graphs"] > 0.97 * peaks["plain"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float32])
def test_a_borrowed_tensor_leaves_its_memory_to_the_allocator(dtype: torch.dtype) -> None:
    from mimo.model.graph_parts import borrowed

    owner = torch.randn(6, 4, 2**19, device="cuda").relu().to(dtype).transpose(0, 1)
    found, before = borrowed(owner), torch.cuda.memory_allocated()
    assert torch.equal(found, owner) and found.stride() == owner.stride() and found.data_ptr() == owner.data_ptr()
    size = owner.numel() * owner.element_size()
    del owner
    assert torch.cuda.memory_allocated() == before - size, "the other one keeps nothing"


def test_a_graph_that_copies_from_the_hosts_memory_is_refused() -> None:
    from mimo.model.graph_parts import refuse_copies_from_host

    source, target = torch.ones(2, 8).pin_memory(), torch.zeros(3, 8, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        target[2].copy_(target[1] + 1)
    refuse_copies_from_host(graph)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for row in range(2):
            target[row].copy_(source[row], non_blocking=True)
    with pytest.raises(RuntimeError, match="copy 64 bytes in 2 pieces"):
        refuse_copies_from_host(graph)
