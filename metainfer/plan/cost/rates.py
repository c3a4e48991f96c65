"""Rates: how fast the GPUs of a machine do each kind of work, and what that rests on.

A rate that the machine's record has comes first. Otherwise it is the card's nominal rate, or that
of its multiprocessors and clock, times what kernels of that architecture reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from metainfer.hardware.cards import Card, card_of_gpu
from metainfer.hardware.curves import MEASURED_HERE, OF_ANOTHER, Rate
from metainfer.hardware.facts import NOT_ASKED, Unknown
from metainfer.hardware.machine import Gpu, Machine, Power, gpus_of
from metainfer.plan.cost.constants import INFERRED, MEASURED, PUBLISHED, Constants, Profile
from metainfer.plan.cost.parts import COPY, Part

_LARGE = 512
"""Rows from which on a call is large: products reach 0.84 of their rate there (`product_rows`)."""

_DOUBT = 1.5
"""By how much a single published figure may lie below what the architecture reaches elsewhere
before it is doubted. A judgement: best and median shapes of one table are apart by 1.15 to 1.35.
The only figure that it meets is that of the RTX 6000D, 143 of 388 TFLOP/s in bf16."""


@dataclass(frozen=True, slots=True)
class Found:
    """A rate, and what it rests on.

    Attributes:
        per_s: operations or bytes a second.
        origin: "measured", "published" or "inferred".
        why: where it is from, in a few words.
        plateau: it is of large calls, so that small ones reach less.
    """

    per_s: float
    origin: str
    why: str
    plateau: bool = True


@dataclass(frozen=True, slots=True)
class Nominal:
    """Of a card: bytes a second of its memory, dense operations a second by format, and what was
    reached on such cards; `left` of their products by its limits of power and clock, for `why`."""

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str
    rates: tuple[Rate, ...] = ()
    left: float = 1.0
    why: str = ""

    def limited(self, rate: Rate) -> Rate:
        """A rate of such cards at their full power, as this one has it."""
        if self.left == 1.0 or rate.work == COPY or origin_of(rate.source) == MEASURED:
            return rate
        return replace(rate, per_s=rate.per_s * self.left, source=f"{rate.source}{self.why}")

    def products(self, form: str) -> float:
        """Of the next wider format where there are none of `form`."""
        return self.flops_per_s.get(form, self.flops_per_s["bf16"])


def origin_of(source: str) -> str:
    """Of a curve or rate as its record says; what was published of another machine is inferred."""
    if source.startswith(MEASURED_HERE):
        return MEASURED
    inferred = source.startswith("inferred") or OF_ANOTHER in source
    return INFERRED if inferred else PUBLISHED


def architecture(gpu: Gpu, constants: Constants) -> str:
    """As the constants name it: the newest that is not newer, such as sm_100 for (10, 3)."""
    major, minor = gpu.capability
    asked = 10 * major + minor
    known = sorted(int(name.removeprefix("sm_")) for name in constants.efficiency)
    return f"sm_{max((n for n in known if n <= asked), default=known[0])}"


class Rates:
    """Rates of the slowest GPU of a machine under one engine.

    Raises nothing: `problem` says in a sentence what is not known of the card; "" for nothing.
    """

    def __init__(self, machine: Machine, constants: Constants, profile: Profile) -> None:
        self._constants = constants
        self._profile = profile
        self._cache: dict[tuple[str, float], Found] = {}
        self.problem = ""
        gpus = gpus_of(machine)
        nominals = [nominal_of(gpu, constants) for gpu in gpus]
        for nominal in nominals:
            if isinstance(nominal, Unknown):
                self.problem = nominal.why
        known = [n for n in nominals if not isinstance(n, Unknown)]
        if not gpus or self.problem:
            self.problem = self.problem or "the machine has no GPU"
            return
        place = min(range(len(known)), key=lambda n: known[n].products("bf16"))
        self._nominal, self.gpu = known[place], gpus[place]
        self.arch = architecture(self.gpu, constants)
        self._efficiency = constants.efficiency[self.arch]
        own = {rate.work for rate in machine.rates}
        others = [rate for rate in self._nominal.rates if rate.work not in own]
        self._recorded = tuple(map(self._nominal.limited, (*machine.rates, *others)))
        self._memory = self.memory()
        self._runs = {
            work: instead.work
            for work, instead in profile.multiplied.items()
            if self.arch not in instead.but_on
        }

    @property
    def multiplies_fp8(self) -> bool:
        return self.gpu.capability >= (8, 9)

    def seconds(self, part: Part, prefill: bool) -> tuple[float, Found]:
        """Of a part, and the rate that bounds it."""
        ramp = part.calls * self._ramp_s(part)
        moving = self._memory
        passes = self._profile.passes if part.work == COPY else 1.0
        bytes_s = passes * part.bytes / moving.per_s
        if part.work == COPY:
            return ramp + bytes_s, moving
        rate = self.of(self._runs.get(part.work, part.work), part.rows)
        share = self._share(part) if rate.plateau else 1.0
        flops_s = part.flops / (rate.per_s * share)
        if prefill and part.between:
            flops_s += part.between / self._between(part.work.partition(" ")[0])
        bound = rate if flops_s > bytes_s else moving
        return ramp + max(flops_s, bytes_s), bound

    def _between(self, kind: str) -> float:
        """Bytes a second of what lies between operations: lists of keys come from the L2 cache,
        beside the products and not under them, scores stay in a kernel; where there is no kernel
        both go through memory, again and again."""
        passes = self._profile.composed.get(kind, 0.0)
        if passes:
            return self._memory.per_s / passes
        if kind == "attention":
            return self._nominal.bytes_per_s * self._efficiency["gather"]
        return math.inf

    def memory(self) -> Found:
        factor = self._profile.rates["memory"]
        recorded = [rate for rate in self._recorded if rate.work == COPY]
        if recorded:
            best = max(recorded, key=lambda rate: rate.rows)
            return Found(best.per_s * factor, origin_of(best.source), best.source)
        rate = self._nominal.bytes_per_s * self._efficiency["memory"]
        why = f"{self._efficiency['memory']:.0%} of {self._nominal.bytes_per_s / 1e12:.2f} TB/s"
        return Found(rate * factor, INFERRED, f"{why} ({self._nominal.source})")

    def of(self, work: str, rows: float) -> Found:
        """Operations a second of `work` with so many rows."""
        key = (work, rows)
        if key not in self._cache:
            self._cache[key] = self._recorded_rate(work, rows) or self._inferred(work)
        return self._cache[key]

    def _recorded_rate(self, work: str, rows: float) -> Found | None:
        # Of few rows a rate says how long a start takes, which is counted apart.
        large = [r for r in self._recorded if r.work == work and not 0 < r.rows < _LARGE]
        points = sorted(large, key=lambda r: r.rows)
        if not points:
            return None
        kind = work.partition(" ")[0]
        factor = self._profile.rates[kind]
        if origin_of(points[-1].source) != MEASURED:
            factor *= self._constants.kernels["of_best"].get(kind, 1.0)
        # A single figure is that of a large call.
        plateau = len(points) == 1
        per_s = _between(points, rows) * factor
        origin, why = origin_of(points[-1].source), points[-1].source
        guess = self._inferred(work)
        if plateau and origin == PUBLISHED and per_s * _DOUBT < guess.per_s:
            # One report far below what such cards reach: between the two.
            per_s, origin = math.sqrt(per_s * guess.per_s), INFERRED
            why = f"between one report and {guess.why} ({why})"
        return Found(per_s, origin, why, plateau)

    def _inferred(self, work: str) -> Found:
        kind, _, operands = work.partition(" ")
        if operands == "f32":
            operands = "bf16"
        # Weights of four bits multiply rows of e4m3, or as the profile says rows of bf16; the
        # nominal rate of e2m1 pairs is of both.
        products = {"fp4": "fp8", "fp4 in bf16": "bf16", "nvfp4": "fp4"}.get(operands, operands)
        if not self.multiplies_fp8 or products not in self._nominal.flops_per_s:
            products = "bf16"
        nominal = self._nominal.flops_per_s[products]
        if work == "product bf16":
            share = max(self._efficiency["product"], self._constants.kernel("library_product"))
        else:
            share = self._efficiency[kind]
        why = f"{share:.0%} of {nominal / 1e12:.0f} TFLOP/s {products} ({self._nominal.source})"
        return Found(nominal * share * self._profile.rates[kind], INFERRED, why)

    def _share(self, part: Part) -> float:
        """Of a plateau that so few rows, or so narrow a slice, reach."""
        kernel = self._constants.kernel
        if part.work.startswith("product"):
            return part.rows / (part.rows + kernel("product_rows"))
        if part.work.startswith("experts"):
            narrow = part.width / (part.width + kernel("expert_width"))
            return narrow * part.rows / (part.rows + kernel("expert_rows"))
        return 1.0

    def _ramp_s(self, part: Part) -> float:
        ramps = self._constants.kernels["ramp_us"]
        kind = part.work.partition(" ")[0]
        if kind == COPY:
            kind = "streams" if part.group == "streams" else "small"
        return float(ramps[kind]) * 1e-6 * self._profile.ramp


def _between(points: Sequence[Rate], rows: float) -> float:
    """By straight lines over logarithms of rows; flat beyond both ends."""
    if rows <= points[0].rows or len(points) == 1:
        return points[0].per_s
    for low, high in pairwise(points):
        if rows <= high.rows:
            least = max(low.rows, 1)
            share = math.log(rows / least) / math.log(high.rows / least)
            return low.per_s * math.pow(high.per_s / low.per_s, share)
    return points[-1].per_s


def nominal_of(gpu: Gpu, constants: Constants) -> Nominal | Unknown:
    """As its card is listed, else from multiprocessors, clock and bandwidth as recorded."""
    card = card_of_gpu(gpu)
    if card is not None:
        left, why = _left_of(gpu, card, constants)
        flops = {form: rate * left for form, rate in card.operations_per_s.items()}
        source = f"nominal, {card.name}{why}"
        return Nominal(card.memory_bytes_per_s, flops, source, card.rates, left, why)
    missing = [
        what
        for what, fact in (
            ("memory bandwidth", gpu.memory_bytes_per_s),
            ("number of multiprocessors", gpu.multiprocessors),
            ("highest clock", NOT_ASKED if isinstance(gpu.clocks, Unknown) else
             gpu.clocks.most_sm_mhz),
        )
        if isinstance(fact, Unknown)
    ]  # fmt: skip
    if missing:
        return Unknown(f"the {gpu.name} is no listed card and its {missing[0]} is not recorded")
    assert not isinstance(gpu.memory_bytes_per_s, Unknown)
    assert not isinstance(gpu.multiprocessors, Unknown)
    assert not isinstance(gpu.clocks, Unknown) and not isinstance(gpu.clocks.most_sm_mhz, Unknown)
    clock = gpu.multiprocessors * gpu.clocks.most_sm_mhz * 1e6
    left, why = 1.0, ""
    if isinstance(gpu.power, Power) and not isinstance(gpu.power.default_limit_w, Unknown):
        left, why = _by_power(gpu.power, gpu.power.default_limit_w, constants)
    peak = constants.peak[architecture(gpu, constants)]
    flops = {form: rate * clock * left for form, rate in peak.items()}
    return Nominal(gpu.memory_bytes_per_s, flops, f"multiprocessors and clock{why}")


def _left_of(gpu: Gpu, card: Card, constants: Constants) -> tuple[float, str]:
    """Share of a card's products that the power limit and the highest clock of this one leave, and
    a few words on it. Its memory has a clock of its own. A limit above the card's, as some boards
    have, adds nothing: nobody measured what."""
    held = [(1.0, "")]
    if isinstance(gpu.power, Power):
        held.append(_by_power(gpu.power, card.power_w, constants))
    if not isinstance(gpu.clocks, Unknown) and not isinstance(gpu.clocks.most_sm_mhz, Unknown):
        peak = constants.peak[architecture(gpu, constants)]["bf16"]
        # At which it makes its nominal products; cards that are held to half of the silicon's, as
        # consumer cards, seem to have half of the clock and so lose nothing here.
        nominal_mhz = card.operations_per_s["bf16"] / (card.multiprocessors * peak) / 1e6
        most = gpu.clocks.most_sm_mhz
        held.append((most / nominal_mhz, f", at {most:,} of {nominal_mhz:,.0f} MHz"))
    return min(held)


def _by_power(power: Power, whole_w: float, constants: Constants) -> tuple[float, str]:
    limit = power.limit_w
    if isinstance(limit, Unknown) or limit >= whole_w:
        return 1.0, ""
    left = (limit / whole_w) ** constants.kernel("power_exponent")
    return left, f", at {limit:.0f} of {whole_w:.0f} W"
