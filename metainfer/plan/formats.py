"""Formats: those of activations and caches, which decide at which cases operations run."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.arch.record import Arch, WeightFormat
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Machine, Unknown
from metainfer.ops.base import Target
from metainfer.ops.capabilities import Capabilities
from metainfer.ops.uses_v4 import is_quantised, served_uses
from metainfer.plan.caches import cache_dtypes
from metainfer.plan.devices import gpu_targets
from metainfer.plan.plan import Origin, Value
from metainfer.plan.proof import CacheProof, Terms
from metainfer.plan.settings import EngineSettings, Residency

_WEIGHTED = ("linear.", "moe.experts")  # operations whose weights may be quantised
_BF16_ISA = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Formats:
    """Values of a plan that decide at which cases operations run."""

    compute_dtype: Value[str]
    activations: Value[str]
    cache_dtype: Value[str]
    index_cache_dtype: Value[str]


def choose_formats(
    machine: Machine,
    arch: Arch,
    settings: EngineSettings,
    capabilities: Capabilities,
    proof: CacheProof | None = None,
) -> Formats:
    """As of `build_plan`, whether or not the model would fit. Raises UserError for flags that
    contradict the model."""
    dtype = _compute_dtype(machine, arch, settings, capabilities.target)
    return Formats(
        dtype,
        choose_activations(arch, settings, capabilities),
        *cache_dtypes(settings, dtype.value, proof),
    )


def terms_here(
    machine: Machine, arch: Arch, settings: EngineSettings, capabilities: Capabilities
) -> Terms:
    """Those of an engine, under which verdicts count for it. Raises UserError as
    `choose_formats`."""
    return Terms(
        str(capabilities.target),
        _compute_dtype(machine, arch, settings, capabilities.target).value,
        choose_activations(arch, settings, capabilities).value,
    )


def terms_on_paper(machine: Machine, arch: Arch) -> Terms:
    """Those of an engine without flags on a machine that may be elsewhere: on its first GPU."""
    settings = EngineSettings()
    target = next(iter(gpu_targets(machine, settings)), Target("cpu"))
    rounded = target.type == "cuda" and is_quantised(arch)
    dtype = _compute_dtype(machine, arch, settings, target).value
    return Terms(str(target), dtype, "fp8" if rounded else "plain")


def _compute_dtype(
    machine: Machine, arch: Arch, settings: EngineSettings, target: Target
) -> Value[str]:
    if settings.dtype is not None:
        return Value(settings.dtype, Origin.FLAG, "given with --dtype")
    if arch.quantisation.linear is WeightFormat.F32:
        return Value("float32", Origin.MODEL, "the checkpoint is in float32")
    if target.type == "cuda":
        return Value("bfloat16", Origin.DEFAULT, "what the GPU's matrix units take")
    isa = machine.cpu.isa
    if isinstance(isa, Unknown):
        return Value("float32", Origin.DEFAULT, f"what the CPU can do is unknown: {isa.why}")
    for extension in _BF16_ISA:
        if extension in isa:
            return Value("bfloat16", Origin.MEASURED, f"the CPU has {extension}")
    return Value("float32", Origin.MEASURED, "the CPU has neither avx512_bf16 nor amx_bf16")


def choose_activations(
    arch: Arch, settings: EngineSettings, capabilities: Capabilities
) -> Value[str]:
    """How rows go into products with quantised matrices."""
    if not is_quantised(arch):
        if settings.activations == "fp8":
            raise UserError(
                f"--activations fp8: no matrix of {arch.name} is quantised",
                hint="leave it out",
            )
        return Value("plain", Origin.MODEL, "no matrix of the checkpoint is quantised")
    if settings.activations is not None:
        return Value(settings.activations, Origin.FLAG, "given with --activations")
    expanded = settings.weights_residency == Residency.EXPANDED
    if expanded or expanding_backends(arch, settings.kernel_order or "", capabilities):
        return Value("plain", Origin.DEFAULT, "expanded weights multiply rows as they are")
    if capabilities.target.type == "cuda":
        return Value("fp8", Origin.MODEL, "as the released model multiplies quantised matrices")
    return Value("plain", Origin.DEFAULT, "a CPU gains nothing by rounding them")


def expanding_backends(arch: Arch, order: str, capabilities: Capabilities) -> list[str]:
    """The backends that an order puts first for products and that expand their weights."""
    plain = served_uses(arch, 1)
    products = dict.fromkeys(use.op for use in plain if use.op.startswith(_WEIGHTED))
    chosen = {capabilities.backend_of(op, order) for op in products}
    return sorted(name for name in chosen if name and name in capabilities.expanding)
