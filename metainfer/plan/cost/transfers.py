"""Transfers: what an exchange between ranks takes, by each way that an engine knows.

Measured curves come first; where there are none, times follow from links of the PCIe tree. All
groups of ranks exchange at once: links that several of them use are shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.hardware.cards import card_of_gpu
from metainfer.hardware.curves import COPY, LOAD, NCCL, RING, STAGED, STORE, Curve, trusted
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.plan.cost.constants import DOUBTFUL, INFERRED, MEASURED, Constants, Profile
from metainfer.plan.cost.curves_of import largest_rate
from metainfer.plan.cost.links import Links
from metainfer.plan.cost.rates import architecture, origin_of

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"

_AS_IT_COMES = "as it comes, bf16, "
"""In the source of a curve of NCCL by its defaults, of which nothing is inferred."""
_LARGE = 2**20
"""Bytes from which on links bound an exchange, and not its steps."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Attributes:
    seconds: of one exchange.
    means: such as "ring of copies", "NCCL".
    origin: "measured", "published", "inferred" or "doubtful".
    why: what it follows from.
    """

    seconds: float
    means: str
    origin: str
    why: str


class Transfers:
    """Of a machine under one engine."""

    def __init__(self, machine: Machine, constants: Constants, profile: Profile) -> None:
        self._curves = trusted(machine.curves)
        self._constants = constants
        self._profile = profile
        self._gpus = gpus_of(machine)
        self._links = Links(machine, constants)
        self._machine = machine
        self._cache: dict[tuple[str, float, int, int], Exchange] = {}
        self.problem = self._links.problem
        self._nvlink_rate = self._rate_of_nvlink() if self._links.nvlink else 0.0

    def p2p(self, ranks: int, groups: int) -> bool:
        """Whether all GPUs of each of the first groups reach each other's memory."""
        return all(self._links.p2p(group) for group in self._links.groups(ranks, groups))

    def exchange(self, operation: str, size: float, ranks: int, groups: int = 1) -> Exchange:
        """The fastest way.

        Args:
            size: bytes of the whole: of what each rank has before an all-reduce or reduce-scatter,
                or after an all-gather.
            ranks: of a group. Groups are of GPUs that lie next to each other.
        """
        if ranks == 1 or size <= 0:
            return Exchange(0.0, "none", MEASURED, "one rank")
        key = (operation, size, ranks, groups)
        if key not in self._cache:
            ways = self._ways(operation, size, ranks, groups)
            self._cache[key] = min(ways, key=lambda way: way.seconds)
        return self._cache[key]

    def from_host(self) -> float:
        """Bytes a second that each GPU reads of host memory, all at once."""
        return self._links.from_host

    def send(self, size: float, ranks: int, groups: int) -> Exchange:
        """From each stage of a pipeline to the next, all at once, as if over one link.

        Args:
            ranks: of a pipeline; groups: of them.
        """
        if size <= 0 or ranks == 1:
            return Exchange(0.0, "none", MEASURED, "one stage")
        transfer = self._constants.transfer
        if self._links.nvlink:
            rate = self._nvlink_rate
            seconds = size / rate + transfer("handed_nvlink_us") * 1e-6
            return Exchange(seconds, "NVLink", INFERRED, _rate(rate))
        if self.p2p(ranks, groups):
            rate = self._links.ring(ranks, groups) * transfer("ring")
            seconds = size / rate + transfer("handed_us") * 1e-6
            return Exchange(seconds, "copies", INFERRED, _rate(rate))
        passed = self._passed_through_host(size, ranks)
        if passed is not None:
            return passed
        rate = self._links.staged / 2  # out, then in
        seconds = size / rate + transfer("handed_staged_us") * 1e-6
        return Exchange(seconds, "host memory", INFERRED, _rate(rate))

    def _ways(self, operation: str, size: float, ranks: int, groups: int) -> list[Exchange]:
        known = self._profile.collectives
        found: list[Exchange] = []
        if self._links.nvlink:
            return [self._nvlink(operation, size, ranks)]
        peers = self.p2p(ranks, groups)
        if "nccl default" in known or "nccl" in known:
            found.append(self._nccl(operation, size, ranks, groups, peers, "nccl" in known))
        if peers and ("one shot" in known or ("one shot of two" in known and ranks == 2)):
            found.append(self._one_shot(operation, size, ranks, groups))
        if peers and "two shot" in known:
            found.append(self._two_shot(operation, size, ranks, groups))
        if peers and "ring" in known:
            found.append(self._ring(operation, size, ranks, groups))
        if "staged" in known:
            found.append(self._staged(operation, size, ranks))
        return found

    def _curves_of(self, means: str, operation: str, ranks: int) -> list[Curve]:
        """Of as many ranks; of an all-reduce where there are none of the operation."""
        for wanted in (operation, ALL_REDUCE):
            found = [
                curve
                for curve in self._curves
                if curve.means == means and curve.operation == wanted and len(curve.gpus) == ranks
            ]
            if found:
                return found
        return []

    def _by_curves(
        self, means: str, name: str, operation: str, size: float, ranks: int, groups: int
    ) -> list[Exchange]:
        """What curves that reach to `size` say, the fastest first."""
        found = []
        for curve in self._curves_of(means, operation, ranks):
            # Curves count each rank's payload: of an all-gather what it gives.
            payload = size / ranks if curve.operation == ALL_GATHER else size
            if payload > curve.bytes[-1] and means in (STORE, LOAD):
                continue  # slower and slower beyond what anybody uses it for
            share = 0.5 if curve.operation == ALL_REDUCE != operation else 1.0
            seconds = share * self._seconds_of(curve, payload, ranks)
            seconds *= self._crowding(size, ranks, groups)
            found.append(Exchange(seconds, name, origin_of(curve.source), curve.source))
        return sorted(found, key=lambda exchange: exchange.seconds)

    def _seconds_of(self, curve: Curve, payload: float, ranks: int) -> float:
        """Behind a curve that ends while starts still count, what the links add."""
        last = curve.bytes[-1]
        if payload <= last or last >= _LARGE or curve.means != NCCL:
            return curve.seconds_of(payload)
        _, share = _steps(curve.operation, ranks)
        link = self._links.ring(ranks, 1)
        bus = link * self._default_share(ranks, 1)[0]
        grown = curve.seconds[-1] - curve.seconds[0]
        # Where starts hide all bytes the curve shows no rate, and links alone bound it.
        shown = share * (last - curve.bytes[0]) / grown if grown > 0 else link
        return curve.seconds[-1] + share * (payload - last) / min(link, max(bus, shown))

    def _crowding(self, size: float, ranks: int, groups: int) -> float:
        """By how much links that groups share slow large exchanges; curves are of one group."""
        if groups == 1 or size < _LARGE:
            return 1.0
        return max(1.0, self._links.ring(ranks, 1) / self._links.ring(ranks, groups))

    def _nccl(
        self, operation: str, size: float, ranks: int, groups: int, peers: bool, tuned: bool
    ) -> Exchange:
        """As it comes it is the slowest that was published, tuned the fastest."""
        transfer = self._constants.transfer
        recorded = self._by_curves(NCCL, NCCL, operation, size, ranks, groups)
        if recorded and not (tuned and peers):
            as_it_comes = [e for e in recorded if _AS_IT_COMES in e.why]
            return (as_it_comes or recorded)[-1]
        steps, share = _steps(operation, ranks)
        link = self._links.ring(ranks, groups)
        latency = (transfer("nccl_base_us") + transfer("nccl_step_us") * steps) * 1e-6
        origin = INFERRED
        if not peers:
            bus, latency = transfer("nccl_host_bytes_per_s"), transfer("nccl_host_us") * 1e-6
        elif tuned:
            bus = link * transfer("nccl_tuned")
        else:
            reached, origin = self._default_share(ranks, groups)
            bus = link * reached
        name = "NCCL, tuned" if tuned else NCCL
        computed = Exchange(latency + share * size / bus, name, origin, _rate(bus))
        # Tuning is never worse than the defaults, which can be kept.
        return min((computed, *recorded[:1]), key=lambda exchange: exchange.seconds)

    def _default_share(self, ranks: int, groups: int) -> tuple[float, str]:
        """Of a link, and what that rests on. NCCL takes peer access across switches alone, and on
        hosts of AMD; what it reaches elsewhere one box told, for islands and for each of them."""
        transfer = self._constants.transfer
        if ranks == 2:
            return transfer("nccl_default_pair"), INFERRED
        group = self._links.groups(ranks, groups)[0]
        if self._links.switched(group) or self._links.amd_host:
            return transfer("nccl_default"), INFERRED
        across = self._links.crosses_sockets(group)
        return transfer("nccl_islands" if across else "nccl_island"), DOUBTFUL

    def _one_shot(self, operation: str, size: float, ranks: int, groups: int) -> Exchange:
        """Every rank gives all it has to all others."""
        recorded = [
            exchange
            for means in (STORE, LOAD)
            for exchange in self._by_curves(means, "one exchange", operation, size, ranks, groups)
        ]
        if operation == ALL_REDUCE and recorded:
            return min(recorded, key=lambda exchange: exchange.seconds)
        rate = self._stores(ranks, groups)
        part = size if operation == ALL_REDUCE else size / ranks
        seconds = self._latency(ranks) + (ranks - 1) * part / rate
        return Exchange(seconds, "one exchange", INFERRED, _rate(rate))

    def _two_shot(self, operation: str, size: float, ranks: int, groups: int) -> Exchange:
        """Every rank adds up its part and gives it to all others."""
        _, share = _steps(operation, ranks)
        rate = self._stores(ranks, groups)
        shots = 2 if operation == ALL_REDUCE else 1
        seconds = shots * self._latency(ranks) + share * size / rate
        return Exchange(seconds, "two exchanges" if shots == 2 else "one exchange", INFERRED,
                        _rate(rate))  # fmt: skip

    def _ring(self, operation: str, size: float, ranks: int, groups: int) -> Exchange:
        transfer = self._constants.transfer
        recorded = self._by_curves(COPY, "ring of copies", operation, size, ranks, groups)
        if recorded:
            return recorded[0]
        steps, share = _steps(operation, ranks)
        passed = largest_rate(self._curves, (COPY,), RING, ranks)
        if passed is None:
            rate, origin = self._links.ring(ranks, groups) * transfer("ring"), INFERRED
        else:
            rate, origin = passed[0] / self._crowding(size, ranks, groups), passed[1]
        seconds = steps * transfer("ring_step_us") * 1e-6 + share * size / rate
        return Exchange(seconds, "ring of copies", origin, _rate(rate))

    def _staged(self, operation: str, size: float, ranks: int) -> Exchange:
        """Out to pinned memory, at most once, and in from there what the others have, which is no
        less; GPUs add."""
        transfer = self._constants.transfer
        recorded = self._by_curves(STAGED, "host memory", operation, size, ranks, 1)
        if recorded:
            return recorded[0]
        _, share = _steps(operation, ranks)
        passed = self._passed_through_host(share * size, ranks)
        if passed is not None:
            return passed
        link = self._links.staged
        busy = share * size / link
        crossing = (1.0 + 2.0 * share) * size * len(self._gpus)
        dram = crossing / self._links.dram()
        seconds = transfer("staged_us") * 1e-6 + max(busy, dram)
        return Exchange(seconds, "host memory", INFERRED, _rate(link))

    def _passed_through_host(self, size: float, ranks: int) -> Exchange | None:
        """As measured: each GPU gives so many bytes to the next through pinned memory and takes as
        many, all of them at once, as groups of ranks are that share the host. Of most GPUs; where
        only a group of fewer than `ranks` was measured nothing is known."""
        curves = [
            curve
            for curve in self._curves
            if curve.means == STAGED and curve.operation == RING and len(curve.gpus) >= ranks
        ]
        if not curves:
            return None
        widest = max(curves, key=lambda curve: len(curve.gpus))
        seconds = widest.seconds_of(size)
        return Exchange(seconds, "host memory", origin_of(widest.source), widest.source)

    def _nvlink(self, operation: str, size: float, ranks: int) -> Exchange:
        _, share = _steps(operation, ranks)
        rate = self._nvlink_rate
        seconds = self._constants.transfer("nvlink_us") * 1e-6 + share * size / rate
        return Exchange(seconds, "NVLink", INFERRED, _rate(rate))

    def _rate_of_nvlink(self) -> float:
        card = card_of_gpu(self._gpus[0])
        if card is not None and card.nvlink_bytes_per_s:
            return card.nvlink_bytes_per_s * self._constants.transfer("nvlink")
        arch = architecture(self._gpus[0], self._constants)
        known = self._constants.transfers["nvlink_bytes_per_s"]
        return float(known.get(arch, min(known.values())))

    def _latency(self, ranks: int) -> float:
        transfer = self._constants.transfer
        return (transfer("one_shot_us") + transfer("one_shot_rank_us") * ranks) * 1e-6

    def _stores(self, ranks: int, groups: int) -> float:
        given = largest_rate(self._curves, (STORE, LOAD), "all_to_all", ranks)
        if given is not None:
            return given[0]
        return self._links.all_to_all(ranks, groups) * self._constants.transfer("stores")


def _steps(operation: str, ranks: int) -> tuple[int, float]:
    """Of a ring, and what of the whole each rank sends."""
    once = (ranks - 1) / ranks
    if operation == ALL_REDUCE:
        return 2 * (ranks - 1), 2.0 * once
    return ranks - 1, once


def _rate(per_s: float) -> str:
    return f"{per_s / 1e9:.1f} GB/s"
