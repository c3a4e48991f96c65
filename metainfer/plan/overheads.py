"""Overheads: memory that no tensor accounts for: context, libraries, buffers of communication, what
an allocator cannot use. Few constants, each with its source."""

from __future__ import annotations

from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Gpu, Machine
from metainfer.plan.layouts import Layout

CONTEXT_BYTES = 224 * 2**20
"""Of a process: driver and the code of loaded kernels. A context with PyTorch takes about 300 MB on
small cards since kernels are loaded lazily (pytorch/pytorch issue 107667), stacks included."""

STACK_BYTES = 1024
"""Stack that the driver keeps for each thread that can be resident (cudaLimitStackSize, default of
the CUDA runtime). Which is why larger cards have larger contexts (pytorch/pytorch 49877)."""

_THREADS = {(8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048, (12, 0): 1536}
"""Resident threads of a multiprocessor, by capability (CUDA programming guide)."""
_MOST_THREADS = 2048
_MOST_MULTIPROCESSORS = 192
"""Taken where the record does not say: more than any card has."""

LIBRARIES_BYTES = 128 * 2**20
"""Workspaces of cuBLAS (32 MiB on sm_90, 8 MiB before; its manual) for each of two streams, and
generators, events, handles."""

NCCL_CONNECTION_BYTES = 10 * 2**20
"""Buffers of one connection in all protocols (10,485,760 bytes, NVIDIA/nccl issue 1685)."""
NCCL_CHANNELS = 16
"""Channels of a ring that NCCL sets up on PCIe at most; a ring has two connections for each
(NVIDIA/nccl issue 864)."""

RESERVE_SHARE = 0.02
"""Of a card: what an allocator cannot hand out in pieces of the right size. 0.98 of a card boots
and dies on long prompts where graphs, buffers and context are not counted, and 0.96 lives
(local-inference-lab, models/glm5.2_v20.md); those are lines of their own here."""

HOST_SHARE = 0.8
"""Of the host's memory that may be taken; other programs live there too."""


def context_bytes(gpu: Gpu) -> int:
    """Of a process on `gpu`, with its stacks and libraries."""
    processors = gpu.multiprocessors
    count = _MOST_MULTIPROCESSORS if isinstance(processors, Unknown) else processors
    threads = _THREADS.get(gpu.capability, _MOST_THREADS)
    return CONTEXT_BYTES + LIBRARIES_BYTES + count * threads * STACK_BYTES


def reserve_bytes(gpu: Gpu) -> int:
    return int(RESERVE_SHARE * gpu.memory_bytes)


def communication_bytes(prefill: Layout, chunk_rows: int, hidden: int, streams: int) -> int:
    """Buffers of a rank: NCCL's, two of the rows of a chunk in bf16 for gather and reduce (what a
    step reads of one while the other fills), and where there are stages, two of the residual
    streams that they hand on."""
    nccl = 2 * NCCL_CHANNELS * NCCL_CONNECTION_BYTES
    rows = -(-chunk_rows // prefill.context)
    total = 0
    if prefill.group > 1:
        total += nccl + 2 * chunk_rows * hidden * 2
    if prefill.pipeline > 1:
        total += nccl + 2 * rows * streams * hidden * 2
    return total


def host_limit(machine: Machine) -> int | None:
    """Bytes of the host's memory that may be taken; None where its size is unknown."""
    total = machine.memory.total_bytes
    return None if isinstance(total, Unknown) else int(total * HOST_SHARE)
