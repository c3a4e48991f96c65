"""Checks of links: sick ones are found, idle ones are not called sick."""

from __future__ import annotations

from dataclasses import replace

from metainfer.doctor.checks import links
from metainfer.doctor.examine import all_checks, examine
from metainfer.doctor.finding import Finding, Level, Patient, exit_code
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine
from metainfer.hardware.pcie import PcieLink
from tests.fakes.machines import make_machine, two_sockets


def with_first_link(link: PcieLink | Unknown, utilisation: float = 0.0) -> Machine:
    machine = two_sockets()
    assert not isinstance(machine.gpus, Unknown)
    first = replace(machine.gpus[0], link=link, utilisation=utilisation)
    return replace(machine, gpus=(first, *machine.gpus[1:]))


def found(check, machine: Machine) -> list[Finding]:
    return list(check(Patient(machine)))


def levels(findings: list[Finding]) -> list[str]:
    return [str(finding.level) for finding in findings]


def test_a_card_on_half_its_lanes_is_a_failure_with_its_cost():
    findings = found(links.width, with_first_link(PcieLink(5, 8, 5, 16)))
    assert levels(findings) == ["fail", "ok"]
    assert "GPU 0" in findings[0].what and "2 times as long" in findings[0].matters
    assert exit_code(findings) == 2


def test_full_width_is_fine_and_unknown_width_is_not_guessed():
    assert levels(found(links.width, two_sockets())) == ["ok"]
    findings = found(links.width, with_first_link(Unknown("a container hides it")))
    assert levels(findings) == ["unknown", "ok"] and exit_code(findings) == 0
    assert findings[0].evidence == "a container hides it"


def test_an_idle_card_may_lower_its_link_and_a_working_one_may_not():
    slow = PcieLink(1, 16, 5, 16)
    assert levels(found(links.generation, with_first_link(slow))) == ["unknown"]
    (finding,) = [
        one for one in found(links.generation, with_first_link(slow, 0.9)) if one.level == "fail"
    ]
    assert "16 times less" in finding.matters


def test_cards_that_share_a_way_up_hear_what_each_gets():
    findings = found(links.uplinks, two_sockets())
    assert [finding.what[:38] for finding in findings] == [
        "GPUs 0, 1 share the way up from switch", "GPUs 2, 3 share the way up from switch",
    ]  # fmt: skip
    assert "31.5 GB/s each" in findings[0].what


def test_machines_without_gpus_have_no_links():
    for machine in (make_machine(), replace(make_machine(), gpus=())):
        for check in links.CHECKS:
            assert not list(check.examine(Patient(machine)))


def test_checks_have_names_of_their_own_and_the_worst_comes_first():
    names = [check.name for check in all_checks()]
    assert len(names) == len(set(names)) and all(check.question for check in all_checks())
    order = [finding.level for finding in examine(Patient(with_first_link(PcieLink(5, 8, 5, 16))))]
    assert order == sorted(order, key=[Level.FAIL, Level.WARN, Level.UNKNOWN, Level.OK].index)
