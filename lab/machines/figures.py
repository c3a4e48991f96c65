"""Where figures of recorded machines come from, and curves that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from metainfer.hardware.curves import NCCL, Curve
from metainfer.hardware.machine import (
    Unknown,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
NOT_SAID = Unknown("the source does not say")

WIKI = "github.com/local-inference-lab/rtx6kpro"
FABRIC = f"{WIKI}, hardware/pcie-bandwidth.md"
ONE_SHOT = f"{WIKI}, optimization/pcie-oneshot-allreduce.md"
AIC = "AIConfigurator's NCCL tables (github.com/ai-dynamo/aiconfigurator), NCCL as it comes, bf16"
COPIES = "github.com/flashinfer-ai/flashinfer, pull 4870"
B12X = "github.com/local-inference-lab/b12x, docs: PCIe calibration probe (July 2026), 8 RTX PRO 6000, one processor"
VLLM_RFC = "github.com/vllm-project/vllm, issue 56128, 4 RTX PRO 6000 Server Edition"
A800 = "github.com/vllm-project/vllm, pull 50941, 8 A800 PCIe"
NO_P2P = "github.com/sgl-project/sglang, pull 39605, 2 RTX 5070 Ti at Gen4 x16"
OWN = "metainfer, one H200 (December 2026)"
STAND_IN = "cpu: cores are not published; two a GPU stand in, and no figure of the GPUs rests on them"


def table(
    means: str, gpus: Iterable[int], points: dict[float, float], source: str, operation: str = "all_reduce"
) -> Curve:
    """Of a collective: {bytes: us}."""
    sizes = tuple(map(int, points))
    return Curve(means, operation, tuple(gpus), True, sizes, tuple(us / 1e6 for us in points.values()), False, source)


def at_rate(
    means: str, gpus: Iterable[int], gb_per_s: float, source: str, at_once: bool = False, operation: str = "copy"
) -> Curve:
    """Of one published rate: 10 us and the bytes at that rate."""
    sizes = tuple(size * KIB for size in (64, 1024, 16 * 1024, 256 * 1024))
    seconds = tuple(round(10e-6 + size / (gb_per_s * 1e9), 9) for size in sizes)
    said = f"{source}: {gb_per_s:g} GB/s; inferred: 10 us a copy, as one of 64 KiB takes on an H200"
    return Curve(means, operation, tuple(gpus), at_once, sizes, seconds, False, said)


def bus(gb_per_s: float, ranks: int, size: float) -> float:
    """us of an all-reduce at a bus bandwidth as nccl-tests count it."""
    return round(size * 2 * (ranks - 1) / ranks / gb_per_s / 1e3, 1)


FEW_MIB = "inferred: 6 MiB as its steps of 24 us, of which B12X's 343 us are 14, and the bytes at that rate"


def ring_of_copies(ranks: int, us_of_96_mib: float) -> float:
    """us of an all-reduce of 6 MiB."""
    return round(2 * (ranks - 1) * 24 + us_of_96_mib / 16)


def aic(ranks: int, us: Sequence[float]) -> dict[float, float]:
    return dict(zip((8 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 512 * MIB), us, strict=True))


PRO_AIC = {
    2: (6.8, 9.2, 44, 474, 1840, 13900),
    4: (13.5, 16.9, 86, 1008, 4032, 30500),
    8: (26.7, 34, 132, 1248, 4927, 38100),
}
L40S_AIC = {
    2: (6, 12.6, 75, 850, 3359, 26700),
    4: (12, 32, 268, 4922, 19699, 156000),
    8: (23, 164, 863, 19376, 55412, 649000),
}


def default_nccl(tables: dict[int, tuple[float, ...]], card: str, counts: Sequence[int]) -> list[Curve]:
    return [table(NCCL, range(n), aic(n, tables[n]), f"{AIC}, {n} of 8 {card}") for n in counts]
