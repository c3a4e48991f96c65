"""Fabric: what measured curves say of the ways between cards, and what they should say."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.cards import card_of_gpu
from metainfer.hardware.curves import (
    ALL_TO_ALL,
    COPY,
    LOAD,
    PULL,
    SEVERAL_ROOTS,
    STORE,
    Curve,
    trusted,
)
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.hardware.measured import rate_of
from metainfer.hardware.topology import islands, p2p_everywhere, way
from metainfer.plan.cost.constants import MEASURED, read_constants
from metainfer.plan.cost.links import Links
from metainfer.plan.cost.rates import origin_of

_PAYLOAD = "payload between cards"
_REGISTRY = "peer access at root ports"
_KERNELS = "kernels against copy engine"
_COLLAPSE = "writes at once"
_PULL = "push against pull"
_CROSSING = "between sockets at once"
_WIRE = "rate of links"
_LATENCY = "latency between cards"

_SLOW_KERNELS = 0.5
_STAGED_KERNELS = 0.15
"""Of the copy engine's rate. Sound boxes have kernels at 0.4 and more; where loads were staged
through host memory 0.05 to 0.07 was reported."""
_COLLAPSED = 0.35
"""Of what the tree gives when all send to all; sound boxes reach 0.5 and more."""
_SOUND_LINK = 0.75
"""Of the coded rate that a copy should reach; 0.85 to 0.9 is usual."""
_SLOW_CROSSING = 0.6
"""Of what a card gets within its node. Boxes that were measured have 0.37 (L40S: 9.7 of 26.3 GB/s)
and 0.44 (sm_120: 23.8 of 54) where all cross at once, and 0.72 to 0.94 (39 to 51 of 54) where one
does; between the two. It decides between a warning and none."""
_FAR_S = 8e-6
"""A few bytes arrive after 0.4 us over peer access and 14 us without, and kernels cost some."""
_FEW_BYTES = 4096

_WIKI = "github.com/local-inference-lab/rtx6kpro"
_KEYS = (
    'tell the driver to take peer access over BAR1: k="ForceP2P=0x11;RMForceP2PType=1;'
    'RMPcieP2PType=2"; k="$k;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"; echo "options'
    ' nvidia NVreg_RegistryDwords=\\"$k\\"" | sudo tee /etc/modprobe.d/nvidia-p2p.conf; sudo'
    " update-initramfs -u; start anew;"
    " take it back if `metainfer probe --measure` then finds payloads wrong or mappings refused"
)
_MEASURE = "run `metainfer probe --measure --out machine.json` on the machine, then"
_AGAIN = _MEASURE + " `metainfer doctor --machine machine.json`"


def payload(patient: Patient) -> Iterator[Finding]:
    """Fast but wrong: a driver that was patched or a bridge that errs answers yes to everything."""
    machine = patient.machine
    if len(gpus_of(machine)) < 2:
        return
    here = [c for c in machine.curves if origin_of(c.source) == MEASURED and len(c.gpus) > 1]
    peers = [c for c in here if c.means in (STORE, LOAD, COPY)]
    wrong = [c for c in here if not c.trusted]
    if wrong:
        listed = "; ".join(sorted({f"{c.means} {_pair(c)} ({c.source})" for c in wrong})[:6])
        yield Finding(
            _PAYLOAD,
            Level.FAIL,
            f"{len(wrong)} ways between cards were fast, and what arrived was not what was sent",
            listed,
            "models answer nonsense or NaN, at full speed and without an error",
            "NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce until it is mended; take the"
            " vendor's driver in place of a patched one, switch ACS off and the IOMMU to"
            " pass-through, then measure again",
            "github.com/aikitoria/open-gpu-kernel-modules/issues/11; "
            "github.com/tinygrad/open-gpu-kernel-modules/issues/17 and /45",
        )
    elif peers:
        yield Finding(_PAYLOAD, Level.OK, "all payloads between cards arrived as they were sent",
                      f"{len(peers)} curves were verified")  # fmt: skip
    elif p2p_everywhere(machine) is True and (names := _without_peers(machine)):
        yield Finding(
            _PAYLOAD,
            Level.WARN,
            "the driver says yes to peer access, and these cards do not come with it",
            f"{', '.join(names)}; a patched driver, and no payload was verified here",
            "where firmware or bridges do not play along such drivers corrupt what they copy, hang,"
            " or are slower: all-to-all of eight 4090 was",
            _AGAIN + "; NCCL_P2P_DISABLE=1 until then",
            "github.com/aikitoria/open-gpu-kernel-modules/issues/11; "
            "github.com/tinygrad/open-gpu-kernel-modules/issues/17 and /45",
        )
    else:
        yield Finding(
            _PAYLOAD,
            Level.UNKNOWN,
            "whether what arrives is what was sent was not checked on this machine",
            "no curve of the record was measured here",
            "drivers that were patched say yes to peer access and corrupt data",
            _AGAIN,
        )


def _without_peers(machine: Machine) -> list[str]:
    """Names of cards that drivers as shipped give no peer access."""
    cards = {gpu.name: card_of_gpu(gpu) for gpu in gpus_of(machine)}
    return [name for name, card in cards.items() if card is not None and not card.p2p]


def registry(patient: Patient) -> Iterator[Finding]:
    """Workstation cards of sm_120 that hang at root ports, without a switch, want a driver key."""
    machine = patient.machine
    gpus = gpus_of(machine)
    if len(gpus) < 2 or any(gpu.capability != (12, 0) for gpu in gpus):
        return
    ways = [way(machine, 0, place) for place in range(1, len(gpus))]
    if p2p_everywhere(machine) is not True or any(isinstance(one, Unknown) for one in ways):
        return
    if all(not isinstance(one, Unknown) and one.meets for one in ways):
        return  # below one switch it works as it is
    state = machine.host.relaxed_p2p
    if _pairs_alone(machine, LOAD):
        return  # measured: the check of kernels against copies says all
    if state is True:
        yield Finding(_REGISTRY, Level.OK, "the driver is told to take peer access at root ports",
                      "RegistryDwords of the driver name ForceP2P")  # fmt: skip
        return
    yield Finding(
        _REGISTRY,
        Level.UNKNOWN if isinstance(state, Unknown) else Level.WARN,
        "cards meet at the processor, and the driver "
        + ("may not be" if isinstance(state, Unknown) else "is not")
        + " told to take peer access there",
        state.why if isinstance(state, Unknown) else "no ForceP2P in the driver's RegistryDwords",
        "decode fell from about 100 to 60 tok/s without it on one box: copies look well, kernels"
        " go through host memory",
        f"grep RegistryDwords /proc/driver/nvidia/params; where ForceP2P is missing {_KEYS}",
        f"{_WIKI}, P2P driver override",
    )


def kernels(patient: Patient) -> Iterator[Finding]:
    """Copy engines may be fast where loads and stores of kernels go through host memory. Of the
    pair for which they are worst."""
    copies = _pairs_alone(patient.machine, COPY)
    for means in (LOAD, STORE):
        moved = _pairs_alone(patient.machine, means)
        shares = {pair: moved[pair] / copies[pair] for pair in moved.keys() & copies.keys()}
        if not shares:
            continue
        share, pair = min((share, pair) for pair, share in shares.items())
        known, engine = moved[pair], copies[pair]
        between = f"from GPU {pair[0]} to {pair[1]} alone"
        evidence = f"{means} {_gb(known)}, copy engine {_gb(engine)}, {between}"
        if share >= _SLOW_KERNELS:
            yield Finding(_KERNELS, Level.OK, f"{means}s reach {share:.0%} of copies", evidence)
            continue
        staged = share < _STAGED_KERNELS
        yield Finding(
            _KERNELS,
            Level.FAIL if staged else Level.WARN,
            f"{means}s of kernels reach {share:.0%} of what the copy engine does",
            evidence,
            "bandwidth tests that copy look well while NCCL and one-shot exchanges, which are"
            f" kernels, take {engine / known:.0f} times as long; 242 in place of 17 us was"
            " reported for a small exchange",
            f"{_KEYS}; until then move bytes with copies"
            if means == LOAD
            else "let cards read in place of write (pull), or move bytes with copies",
            f"{_WIKI}, optimization/pcie-oneshot-allreduce and hardware/pcie-bandwidth",
        )


def collapse(patient: Patient) -> Iterator[Finding]:
    """Writes of several cards below one switch to several roots fall to a tenth on some boxes."""
    machine = patient.machine
    curves = trusted(machine.curves)
    if len(gpus_of(machine)) < 2:
        return
    for means in (STORE, LOAD):
        together = [c for c in curves if c.means == means and c.operation == ALL_TO_ALL]
        if together:
            curve = max(together, key=lambda c: len(c.gpus))
            tree = Links(machine, read_constants()).all_to_all(len(curve.gpus), 1)
            yield _held_up(curve, tree, f"{len(curve.gpus)} cards to all others", "links give")
    crossing_roots = {c.means: c for c in curves if c.operation == SEVERAL_ROOTS}
    others = [rate_of(c) for means, c in crossing_roots.items() if means != STORE]
    if STORE in crossing_roots and others:
        stores = crossing_roots[STORE]
        yield _held_up(stores, max(others), "cards below some roots to others", "loads or copies")


def _held_up(curve: Curve, expected: float, where: str, what: str) -> Finding:
    known = rate_of(curve)
    evidence = (
        f"{curve.means}s of {where} {_gb(known)} a card, {what} {_gb(expected)}; {curve.source}"
    )
    if known >= _COLLAPSED * expected:
        return Finding(_COLLAPSE, Level.OK, f"{curve.means}s of {where} hold up", evidence)
    return Finding(
        _COLLAPSE,
        Level.FAIL if curve.means == STORE else Level.WARN,
        f"{curve.means}s of {where} collapse: {known / expected:.0%} of what {what} reach"
        if what != "links give"
        else f"{curve.means}s of {where} collapse: {known / expected:.0%} of what links give",
        evidence,
        "exchanges that write to all peers (one-shot all-reduce) get slower than NCCL: 504"
        " against 68 us at 64 KB and 334 against 2.7 ms at 32 MB on a box like this",
        "leave custom all-reduce off on these cards (vLLM and SGLang:"
        " --disable-custom-all-reduce), or let kernels read (pull) in place of write; rings and"
        " islands of cards below one switch are not hit; kernel, driver and slots do not change it",
        f"{_WIKI}, hardware/collapse-report; github.com/local-inference-lab/b12x/pull/139",
    )


def pull(patient: Patient) -> Iterator[Finding]:
    """Whether it matters which of two cards starts a copy."""
    curves = trusted(patient.machine.curves)
    push = {c.gpus: rate_of(c) for c in curves if (c.means, c.operation) == (COPY, "copy")}
    pulled = {c.gpus: rate_of(c) for c in curves if (c.means, c.operation) == (COPY, PULL)}
    both = [(pulled[pair] / push[pair], pair) for pair in pulled if pair in push]
    if not both:
        return
    (least, slow), (most, fast) = min(both), max(both)
    evidence = (
        f"a copy started by the target takes {1 / most:.2f} (GPU {fast[0]} to {fast[1]}) to"
        f" {1 / least:.2f} times as long as one started by the source"
    )
    if max(most, 1 / least) < 1.3:
        yield Finding(_PULL, Level.OK, "it does not matter which card starts a copy", evidence)
        return
    better, pair = ("target", fast) if most > 1 / least else ("source", slow)
    yield Finding(
        _PULL,
        Level.WARN,
        f"copies are faster where the {better} starts them (GPU {pair[0]} to {pair[1]})",
        evidence,
        "engines that take the other way lose that much of every exchange",
        "use exchanges that " + ("pull" if better == "target" else "push"),
        "github.com/local-inference-lab/b12x/pull/139",
    )


def crossing(patient: Patient) -> Iterator[Finding]:
    """What each card gets when all cross between processors."""
    machine = patient.machine
    groups = islands(machine)
    if isinstance(groups, Unknown) or len(groups) < 2:
        return
    place_of = {place: n for n, group in enumerate(groups) for place in group}
    copies = [
        c
        for c in trusted(machine.curves)
        if (c.means, c.operation) == (COPY, "copy") and len(c.gpus) == 2
    ]
    within = [rate_of(c) for c in copies if place_of[c.gpus[0]] == place_of[c.gpus[1]]]
    across = [c for c in copies if place_of[c.gpus[0]] != place_of[c.gpus[1]]]
    if not within or not across:
        return
    slowest = min(across, key=rate_of)
    share = rate_of(slowest) / max(within)
    crowd = "all at once" if slowest.at_once else "alone"
    evidence = (
        f"{_gb(rate_of(slowest))} across ({crowd}), {_gb(max(within))} within; {slowest.source}"
    )
    if share >= _SLOW_CROSSING:
        yield Finding(_CROSSING, Level.OK, f"crossing costs {1 - share:.0%} of the rate", evidence)
        return
    yield Finding(
        _CROSSING,
        Level.WARN,
        f"between sockets each card gets {share:.0%} of what it gets within one",
        evidence,
        "a ring crosses twice and keeps up; patterns in which all send to all cross with every"
        " pair",
        "groups of tensor parallelism inside one node, replicas or pipeline stages across; set"
        " NCCL_ALGO=Ring where a tree or all-to-all is chosen",
        "github.com/flashinfer-ai/flashinfer/pull/4870",
    )


def wire(patient: Patient) -> Iterator[Finding]:
    """A copy far below its link means errors on the link, or a way that nobody sees."""
    machine = patient.machine
    shares: list[float] = []
    for curve in trusted(machine.curves):
        wired = _wired(machine, curve)
        if wired is None:
            continue
        share = rate_of(curve) / wired
        shares.append(share)
        if share < _SOUND_LINK:
            yield Finding(
                _WIRE,
                Level.WARN,
                f"copies {_pair(curve)} reach {share:.0%} of their links; 85 to 90 % is usual",
                f"{_gb(rate_of(curve))} of {_gb(wired)} as coded; {curve.source}",
                "all that these cards tell each other takes that much longer",
                "look for replays on the link (nvidia-smi -q, PCIe section: replays since reset),"
                " switch ASPM off (pcie_aspm=off), ACS off and the IOMMU to pass-through",
                f"{_WIKI}, hardware/pcie-bandwidth",
            )
    if shares and min(shares) >= _SOUND_LINK:
        yield Finding(_WIRE, Level.OK, f"copies reach {min(shares):.0%} of their links or more",
                      f"{len(shares)} pairs alone")  # fmt: skip


def _wired(machine: Machine, curve: Curve) -> float | None:
    """What the links of a pair give as coded; None where it does not bound the copy, or is not
    known."""
    gpus = gpus_of(machine)
    if (curve.means, curve.operation) != (COPY, "copy") or curve.at_once or len(curve.gpus) != 2:
        return None
    if max(curve.gpus) >= len(gpus) or machine.nvlink is True or _crosses(machine, curve):
        return None
    links = [gpus[place].link for place in curve.gpus]
    coded = [link.bytes_per_s() for link in links if not isinstance(link, Unknown)]
    known = [rate for rate in coded if not isinstance(rate, Unknown)]
    return min(known) if len(known) == 2 else None


def latency(patient: Patient) -> Iterator[Finding]:
    """Of a few bytes: what decode waits for, twice a layer."""
    shape = patient.shape
    small = [
        c
        for c in trusted(patient.machine.curves)
        if c.operation == "copy" and c.means in (STORE, LOAD) and c.bytes[0] <= _FEW_BYTES
    ]
    if not small:
        return
    curve = min(small, key=lambda c: c.seconds[0])
    micros = curve.seconds[0] * 1e6
    evidence = f"{curve.means} of {curve.bytes[0]} B {_pair(curve)}: {micros:.1f} us"
    if curve.seconds[0] < _FAR_S:
        yield Finding(_LATENCY, Level.OK, f"a few bytes take {micros:.1f} us", evidence)
        return
    worth = ""
    if shape is not None:
        each_ms = 2 * shape.num_layers * curve.seconds[0] * 1e3
        worth = f"; {shape.name} exchanges {2 * shape.num_layers} times a token: {each_ms:.1f} ms"
    yield Finding(
        _LATENCY,
        Level.WARN,
        f"a few bytes between cards take {micros:.0f} us, as through host memory",
        evidence,
        f"0.4 us are usual over peer access{worth}",
        "see the findings on peer access, ACS and IOMMU; where it stays, fewer ranks and"
        " speculation cost least",
        f"{_WIKI}, hardware/pcie-bandwidth",
    )


def _pairs_alone(machine: Machine, means: str) -> dict[tuple[int, ...], float]:
    """Bytes a second of copies between two cards while nobody else sends."""
    return {
        c.gpus: rate_of(c)
        for c in trusted(machine.curves)
        if (c.means, c.operation, c.at_once) == (means, "copy", False)
    }


def _crosses(machine: Machine, curve: Curve) -> bool:
    between = way(machine, curve.gpus[0], curve.gpus[1])
    return not isinstance(between, Unknown) and between.crosses_sockets is not False


def _pair(curve: Curve) -> str:
    if curve.operation == "copy" and len(curve.gpus) == 2:
        return f"from GPU {curve.gpus[0]} to {curve.gpus[1]}"
    return f"{curve.operation} of {len(curve.gpus)}"


def _gb(per_s: float) -> str:
    return f"{per_s / 1e9:.1f} GB/s"


CHECKS = (
    Check(_PAYLOAD, "Does what cards send arrive as it was sent?", payload),
    Check(_REGISTRY, "Is the driver told to let cards at root ports reach each other?", registry),
    Check(_KERNELS, "Do loads and stores of kernels keep up with copies?", kernels),
    Check(_COLLAPSE, "Do writes hold up when all cards send at once?", collapse),
    Check(_PULL, "Does it matter which card starts a copy?", pull),
    Check(_CROSSING, "What is left when all cards cross between processors?", crossing),
    Check(_WIRE, "Do copies reach what their links give?", wire),
    Check(_LATENCY, "How long do a few bytes take between cards?", latency),
)
