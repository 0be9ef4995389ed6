"""Kinds of GPUs and their figures. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

# Share of a GPU's memory that a run may plan with.
USABLE = 0.97


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU and its links.

    Attributes:
        name: name for messages, from the driver or from `GPUS`.
        tflops: dense bf16 TFLOP/s of its data sheet.
        memory_gib: memory that tensors can take. The driver and NCCL's communicators need about 5 GiB besides.
        link_gb_s: GB/s that collectives reach from one GPU to another of the node, one way.
        network_gb_s: the same between nodes, for each GPU.
        gpus_per_node: GPUs that are linked directly.
    """

    name: str
    tflops: float
    memory_gib: float
    link_gb_s: float
    network_gb_s: float
    gpus_per_node: int = 8

    @property
    def usable_bytes(self) -> float:
        """Memory that a run may plan with."""
        return USABLE * self.memory_gib * 2**30

    @property
    def launches_kernels(self) -> bool:
        """Whether it is a GPU. The profile of a host without one has fewer TFLOP/s."""
        return self.tflops >= GPUS["A100"].tflops

    @property
    def multiplies_packed_experts(self) -> bool:
        """Whether one product serves all experts of a layer (--moe-gemm packed) and FP8 is possible, from Hopper on."""
        return self.tflops >= GPUS["H100"].tflops


# From NVIDIA's data sheets, with four fifths of the bandwidths, which is what NCCL reaches with large messages.
GPUS = {
    "A100": Gpu("A100", 312.0, 74.0, 240.0, 20.0),
    "H100": Gpu("H100", 989.5, 74.0, 360.0, 40.0),
    "H200": Gpu("H200", 989.5, 134.5, 360.0, 40.0),
    "B200": Gpu("B200", 2250.0, 173.0, 720.0, 40.0),
    "GB200": Gpu("GB200", 2500.0, 179.0, 720.0, 40.0, 4),
}
