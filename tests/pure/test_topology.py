"""Ways between GPUs, shared links, islands, fingerprints."""

from __future__ import annotations

from dataclasses import replace

from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Clocks, Gpu
from metainfer.hardware.pcie import Bridge, Peer
from metainfer.hardware.topology import (
    fingerprint,
    islands,
    p2p_everywhere,
    shared_uplinks,
    way,
)
from tests.fakes.machines import GEN5, GIB, make_machine, two_sockets

CARD = Gpu("a card", (12, 0), 96 * GIB, 95 * GIB, link=GEN5)


def test_ways_have_the_kinds_that_the_driver_s_tool_tells():
    machine = two_sockets()
    assert [way(machine, 0, other).kind for other in (1, 2, 4)] == ["PIX", "NODE", "SYS"]
    assert way(machine, 0, 1).links == ("gpu 0", "gpu 1") and way(machine, 0, 1).meets == "switch a"
    assert way(machine, 0, 2).links == (
        "gpu 0", "switch a", "root a", "root b", "switch b", "gpu 2",
    )  # fmt: skip


def test_links_that_cards_share_and_islands():
    machine = two_sockets()
    assert shared_uplinks(machine) == {"switch a": (0, 1), "switch b": (2, 3)}
    assert islands(machine) == ((0, 1, 2, 3), (4,))


def test_what_is_not_known_stays_so():
    machine = make_machine(gpus=(CARD, CARD))
    assert isinstance(way(machine, 0, 1), Unknown) and isinstance(islands(machine), Unknown)
    assert isinstance(way(make_machine(), 0, 1), Unknown)
    circle = replace(two_sockets(), bridges=(Bridge("switch a", "switch", "switch a"),))
    assert isinstance(way(circle, 0, 1), Unknown)


def test_p2p_everywhere():
    machine = two_sockets()
    assert isinstance(p2p_everywhere(machine), Unknown)
    assert p2p_everywhere(replace(machine, peers=(Peer(0, 1, True),))) is True
    mixed = (Peer(0, 1, Unknown("no")), Peer(1, 0, False, "not supported"))
    assert p2p_everywhere(replace(machine, peers=mixed)) is False
    assert p2p_everywhere(replace(machine, peers=mixed[:1])) == Unknown("no")


def test_a_fingerprint_changes_with_the_machine_and_not_with_its_load():
    machine = two_sockets()
    busy = replace(CARD, free_bytes=1, clocks=Clocks(2400, 1000), utilisation=1.0)
    idle_link = replace(GEN5, generation=1)

    def changed(**what):
        first = replace(machine.gpus[0], **what)
        return replace(machine, gpus=(first, *machine.gpus[1:]))

    mine = fingerprint(machine)
    assert fingerprint(changed(free_bytes=busy.free_bytes, clocks=busy.clocks)) == mine
    assert fingerprint(changed(link=idle_link)) == mine
    assert fingerprint(changed(link=replace(GEN5, width=8))) != mine
    assert fingerprint(changed(parent="switch b")) != mine
    assert fingerprint(replace(machine, driver="580.1")) != mine
