"""Peers: may cards reach each other's memory, and does anything on the way send it round?"""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.core.units import format_bytes
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import gpus_of
from metainfer.hardware.topology import islands

_P2P = "peer access"
_ACS = "access control (ACS)"
_IOMMU = "IOMMU"
_HMM = "heterogeneous memory (HMM)"
_BAR1 = "BAR1 window"
_SOCKETS = "two sockets"

_REPORTS = "github.com/local-inference-lab/rtx6kpro, hardware pages: RTX PRO 6000"


def peer_access(patient: Patient) -> Iterator[Finding]:
    """What the driver says. That it works, only a payload shows."""
    machine = patient.machine
    if len(gpus_of(machine)) < 2:
        return
    if isinstance(machine.peers, Unknown):
        yield Finding(
            _P2P, Level.UNKNOWN, "whether cards reach each other's memory is not known",
            machine.peers.why, fix="run `metainfer probe` on the machine itself",
        )  # fmt: skip
        return
    refused = [peer for peer in machine.peers if peer.p2p is False]
    if not refused:
        unknown = [peer for peer in machine.peers if isinstance(peer.p2p, Unknown)]
        if unknown:
            why = unknown[0].p2p
            assert isinstance(why, Unknown)
            yield Finding(_P2P, Level.UNKNOWN, f"{len(unknown)} pairs are not known", why.why)
        else:
            yield Finding(
                _P2P, Level.OK, "the driver lets every card reach every other one's memory",
                f"{len(machine.peers)} ordered pairs",
                fix="that what arrives is what was sent shows `metainfer probe --measure`",
            )  # fmt: skip
        return
    whys = sorted({peer.why for peer in refused if peer.why})
    yield Finding(
        _P2P,
        Level.WARN,
        f"{len(refused)} of {len(machine.peers)} ordered pairs do not reach each other's memory",
        "; ".join(whys) or "the driver gives no reason",
        "what cards tell each other goes through host memory: 1.9 to 12.5 GB/s with NCCL, and a"
        " latency of about 14 us in place of 0.4",
        "on workstation and data-centre cards: switch IOMMU to pass-through, ACS off, large BAR"
        " (above 4G decoding) on in the firmware; GeForce cards come without it: plan for host"
        " staging and pipeline stages (`metainfer plan`), and do not trust patched drivers before"
        " a payload was verified",
        "github.com/sgl-project/sglang/pull/39605 (2x 5070 Ti); " + _REPORTS,
    )


def access_control(patient: Patient) -> Iterator[Finding]:
    """ACS redirects send what could go from card to card through the root."""
    machine = patient.machine
    if isinstance(machine.bridges, Unknown) or len(gpus_of(machine)) < 2:
        return
    on = [bridge.name for bridge in machine.bridges if bridge.acs_redirects is True]
    unknown = [b for b in machine.bridges if isinstance(b.acs_redirects, Unknown)]
    if on:
        yield Finding(
            _ACS,
            Level.FAIL,
            f"{len(on)} bridges above GPUs send traffic between cards up to the root",
            ", ".join(on),
            "two ways at once below one switch fall from 103 to 50 GB/s, and NCCL may hang",
            "switch ACS off in the firmware, or at each start, on root ports and switch ports"
            " alike: " + "; ".join(f"setpci -s {name} ECAP_ACS+6.w=0000" for name in on[:4]),
            _REPORTS + "; github.com/NVIDIA/nccl/issues/2079",
        )
    if unknown:
        why = unknown[0].acs_redirects
        assert isinstance(why, Unknown)
        yield Finding(
            _ACS, Level.UNKNOWN, f"access control of {len(unknown)} bridges is not known", why.why,
            fix="run `sudo metainfer probe --out machine.json`, then `metainfer doctor --machine"
            " machine.json`",
        )  # fmt: skip
    elif not on and machine.bridges:
        yield Finding(_ACS, Level.OK, "no bridge sends traffic between cards to the root",
                      f"{len(machine.bridges)} bridges")  # fmt: skip


def iommu(patient: Patient) -> Iterator[Finding]:
    """Translation costs peers bandwidth, or breaks them."""
    state = patient.machine.host.iommu
    if len(gpus_of(patient.machine)) < 2:
        return
    if isinstance(state, Unknown):
        yield Finding(
            _IOMMU, Level.UNKNOWN, "the state of the IOMMU is not known", state.why,
            fix="run `metainfer probe --out machine.json` on the machine; `dmesg | grep -i iommu`"
            " tells it too",
        )  # fmt: skip
    elif state == "translating":
        yield Finding(
            _IOMMU,
            Level.WARN,
            "the IOMMU translates addresses of devices",
            "its groups are of a translating type, and iommu=pt is no parameter of the kernel",
            "peer traffic costs about 15 % more, and NCCL was seen to hang with eight cards",
            "start the system with iommu=pt (and amd_iommu=on or intel_iommu=on), or switch it off"
            " in the firmware",
            _REPORTS,
        )
    else:
        yield Finding(_IOMMU, Level.OK, f"the IOMMU is {state}", "as peers want it")


def hmm(patient: Patient) -> Iterator[Finding]:
    state = patient.machine.host.hmm
    if isinstance(state, Unknown) or len(gpus_of(patient.machine)) < 2:
        return
    if state:
        yield Finding(
            _HMM,
            Level.WARN,
            "the driver shares page tables with the system",
            "uvm_disable_hmm is N",
            "on boxes with several cards it was part of hangs and of slow peer access",
            "echo 'options nvidia_uvm uvm_disable_hmm=1' > /etc/modprobe.d/uvm.conf, then load the"
            " driver anew",
            _REPORTS,
        )
    else:
        yield Finding(_HMM, Level.OK, "the driver does not share page tables", "uvm_disable_hmm=Y")


def bar1(patient: Patient) -> Iterator[Finding]:
    """Through a small window peers see a part of the memory only."""
    gpus = patient.machine.gpus
    if isinstance(gpus, Unknown) or len(gpus) < 2:
        return
    for place, gpu in enumerate(gpus):
        if isinstance(gpu.bar1_bytes, Unknown) or gpu.bar1_bytes >= gpu.memory_bytes // 2:
            continue
        yield Finding(
            _BAR1,
            Level.WARN,
            f"GPU {place} shows others {format_bytes(gpu.bar1_bytes)} of its memory at a time",
            f"BAR1 {format_bytes(gpu.bar1_bytes)}, memory {format_bytes(gpu.memory_bytes)}",
            "peer access is refused or goes in pieces where the window is small",
            "switch on resizable BAR and decoding above 4 GB in the firmware",
            _REPORTS,
        )


def sockets(patient: Patient) -> Iterator[Finding]:
    """Cards behind two processors."""
    groups = islands(patient.machine)
    if isinstance(groups, Unknown) or len(groups) < 2 or patient.machine.nvlink is True:
        return
    listed = " | ".join(",".join(map(str, group)) for group in groups)
    yield Finding(
        _SOCKETS,
        Level.WARN,
        f"the cards hang at {len(groups)} NUMA nodes",
        f"GPUs {listed}",
        "between sockets a card gets 39 to 51 GB/s alone, and 10 (generation 4) to 24 GB/s where"
        " all cross at once, of 26 and 54 within one",
        "keep tensor parallelism inside one node and cross with replicas or pipeline stages, or"
        " use collectives that cross once (`metainfer plan` compares them)",
        "github.com/flashinfer-ai/flashinfer/pull/4870; " + _REPORTS,
    )


CHECKS = (
    Check(_P2P, "Do cards reach each other's memory?", peer_access),
    Check(_ACS, "Does access control send traffic between cards through the root?", access_control),
    Check(_IOMMU, "Does the IOMMU translate what cards send?", iommu),
    Check(_HMM, "Does the driver share page tables with the system?", hmm),
    Check(_BAR1, "Do peers see all of a card's memory?", bar1),
    Check(_SOCKETS, "Do cards hang at one processor?", sockets),
)
