"""Cards: what holds them back, and who else uses them."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.core.units import format_bytes
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Power, gpus_of

_THROTTLE = "clocks"
_POWER = "power limit"
_MIXED = "mixed cards"
_HELD = "memory held by others"
_SPIN = "busy without work"
_MIG = "MIG"

_SPIN_POWER_SHARE = 0.3
"""Of its limit that a card draws at most while it only waits in a collective: reported are 100 %
busy cards below 150 W of 600 (0.25), and 220 W of 600 (0.37) of cards that did work, if slowly.
A judgement between the two; it decides between a warning and none."""
_RESERVED_BYTES = 2**30
"""What the driver itself may hold of a card: half a gigabyte and more counts as in use."""
_HARMLESS = frozenset({"idle", "clocks set by an application"})


def throttle(patient: Patient) -> Iterator[Finding]:
    for place, gpu in enumerate(gpus_of(patient.machine)):
        if isinstance(gpu.throttle, Unknown):
            continue
        reasons = [reason for reason in gpu.throttle if reason not in _HARMLESS]
        if reasons:
            hot = any("temperature" in reason or "slowdown" in reason for reason in reasons)
            yield Finding(
                _THROTTLE,
                Level.FAIL if hot else Level.WARN,
                f"GPU {place} lowers its clocks now: {', '.join(reasons)}",
                f"{gpu.name}: {', '.join(gpu.throttle)}",
                "a step of several cards waits for the slowest",
                "give it cooler air, more slots between cards or a lower power limit on all cards"
                if hot
                else "the power limit is reached: raise it where the card and the supply allow it",
            )


def power(patient: Patient) -> Iterator[Finding]:
    """A limit below the one that the card comes with is a choice; it should be a known one."""
    for place, gpu in enumerate(gpus_of(patient.machine)):
        if not isinstance(gpu.power, Power):
            continue
        limit, default = gpu.power.limit_w, gpu.power.default_limit_w
        if isinstance(limit, Unknown) or isinstance(default, Unknown) or limit >= default:
            continue
        yield Finding(
            _POWER,
            Level.WARN,
            f"GPU {place} is limited to {limit:.0f} of {default:.0f} W",
            f"{gpu.name}: enforced {limit:.0f} W, default {default:.0f} W",
            "prefill is bound by power: its rate falls with the limit, decode hardly does",
            f"nvidia-smi -i {place} -pl {default:.0f}, unless heat or the supply forbid it",
        )


def mixed(patient: Patient) -> Iterator[Finding]:
    """Ranks in step go as fast as the slowest, and fit what the smallest holds."""
    gpus = gpus_of(patient.machine)
    kinds = sorted({(gpu.name, gpu.memory_bytes) for gpu in gpus})
    if len(kinds) > 1:
        listed = "; ".join(f"{name} with {format_bytes(size)}" for name, size in kinds)
        smallest = min(gpu.memory_bytes for gpu in gpus)
        wasted = sum(gpu.memory_bytes - smallest for gpu in gpus)
        yield Finding(
            _MIXED,
            Level.WARN,
            f"the cards are of {len(kinds)} kinds",
            listed,
            f"an even layout over all leaves {format_bytes(wasted)} unused and goes at the pace of"
            " the slowest",
            "use equal cards for one replica (CUDA_VISIBLE_DEVICES), or pipeline stages of unequal"
            " depth",
        )


def held(patient: Patient) -> Iterator[Finding]:
    """Memory that nobody who still serves may need: workers survive a server that was killed."""
    for place, gpu in enumerate(gpus_of(patient.machine)):
        used = gpu.memory_bytes - gpu.free_bytes
        if used < gpu.memory_bytes // 50 or (gpu.processes == () and used < _RESERVED_BYTES):
            continue
        if isinstance(gpu.processes, Unknown):
            who, fix = gpu.processes.why, "look for it with nvidia-smi as the administrator"
        elif gpu.processes:
            who = ", ".join(f"{p.pid} ({_name(p.name)})" for p in gpu.processes)
            fix = "if they are left over from a server that ended: kill " + " ".join(
                str(process.pid) for process in gpu.processes
            )
        else:
            who = "no process that this one may see"
            fix = "another container or user holds it; or reset the card while nobody uses it"
        yield Finding(
            _HELD,
            Level.WARN,
            f"{format_bytes(used)} of GPU {place} are taken already",
            who,
            "weights and caches get that much less",
            fix,
        )


def spinning(patient: Patient) -> Iterator[Finding]:
    """Collectives wait by spinning: busy, and cold."""
    waiting = [
        f"GPU {place}: {gpu.utilisation:.0%}, {gpu.power.draw_w:.0f} of {gpu.power.limit_w:.0f} W"
        for place, gpu in enumerate(gpus_of(patient.machine))
        if isinstance(gpu.power, Power)
        and not isinstance(gpu.utilisation, Unknown)
        and not isinstance(gpu.power.draw_w, Unknown)
        and not isinstance(gpu.power.limit_w, Unknown)
        and gpu.utilisation > 0.95
        and gpu.power.draw_w < _SPIN_POWER_SHARE * gpu.power.limit_w
    ]
    if waiting:
        yield Finding(
            _SPIN,
            Level.WARN,
            f"{len(waiting)} cards are busy and draw little: they wait in a collective",
            "; ".join(waiting),
            "the load that is shown is not work",
            "look at what the ranks wait for: a rank that died, a slow link (`metainfer doctor`"
            " on links and peers), or steps too small for so many cards",
        )


def mig(patient: Patient) -> Iterator[Finding]:
    for place, gpu in enumerate(gpus_of(patient.machine)):
        if gpu.mig is True:
            yield Finding(
                _MIG,
                Level.WARN,
                f"GPU {place} is split by MIG",
                gpu.name,
                "a slice has a share of memory, SMs and bandwidth, and no peer access",
                f"nvidia-smi -i {place} -mig 0, unless the split is wanted",
            )


def _name(name: str | Unknown) -> str:
    return "unknown" if isinstance(name, Unknown) else name


CHECKS = (
    Check(_THROTTLE, "Are clocks lowered by heat or power?", throttle),
    Check(_POWER, "Is a card limited below what it comes with?", power),
    Check(_MIXED, "Are all cards alike?", mixed),
    Check(_HELD, "Is memory taken before anything starts?", held),
    Check(_SPIN, "Are busy cards working?", spinning),
    Check(_MIG, "Are cards split?", mig),
)
