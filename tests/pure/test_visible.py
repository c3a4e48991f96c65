"""Cards that CUDA_VISIBLE_DEVICES leaves to a process, and plans for those alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.hardware import known
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Machine
from metainfer.hardware.topology import fingerprint
from metainfer.hardware.visible import VARIABLE, numbers_of, shown_by, shown_machine
from tests.fakes.command import metainfer


def named(machine: Machine) -> Machine:
    assert not isinstance(machine.gpus, Unknown)
    gpus = tuple(replace(gpu, uuid=f"GPU-{place}a") for place, gpu in enumerate(machine.gpus))
    return replace(machine, gpus=gpus)


@pytest.mark.parametrize(
    ("value", "places"),
    [
        ("2,3", (2, 3)),
        (" 3 , 0", (3, 0)),
        ("0,,x", (0,)),
        ("0,9,1", (0,)),
        ("-1", ()),
        ("", ()),
        ("1,1,2", (1,)),
        ("GPU-3,GPU-1a", (3, 1)),
        ("GPU-,1", ()),
        ("GPU-9,1", ()),
    ],
)
def test_entries_count_up_to_the_first_that_names_no_card(
    value: str, places: tuple[int, ...]
) -> None:
    machine = named(machine_of("rtx-pro-6000-x4"))
    assert not isinstance(machine.gpus, Unknown)
    shown = shown_by(value, machine.gpus)
    assert shown.places == places and not shown.doubt


def test_names_that_no_record_has_are_counted_and_said_to_be() -> None:
    machine = machine_of("rtx-pro-6000-x4")
    assert not isinstance(machine.gpus, Unknown)
    shown = shown_by("GPU-7,GPU-8,x", machine.gpus)
    assert shown.places == (0, 1) and "is not recorded" in shown.doubt
    other = replace(machine.gpus[0], name="another card")
    assert "PCI_BUS_ID" in shown_by("1", (other, *machine.gpus)).doubt
    assert not shown_by("1", (other, *machine.gpus), by_bus=True).doubt


def test_pairs_and_curves_of_shown_cards_are_counted_anew() -> None:
    machine = machine_of("rtx-pro-6000-x8")
    fewer, said = shown_machine(machine, "6,7,2")
    assert not isinstance(fewer.gpus, Unknown) and not isinstance(fewer.peers, Unknown)
    assert not isinstance(machine.gpus, Unknown)
    assert fewer.gpus == (machine.gpus[6], machine.gpus[7], machine.gpus[2])
    assert len(fewer.peers) == 6 and {peer.source for peer in fewer.peers} == {0, 1, 2}
    assert all(set(curve.gpus) <= {0, 1, 2} for curve in fewer.curves)
    assert "3 of 8 GPUs (6, 7, 2)" in said and numbers_of(fewer) == ["6", "7", "2"]
    assert shown_machine(machine, "0,1,2,3,4,5,6,7") == (machine, "")
    assert shown_machine(machine, None) == (machine, "")
    assert fingerprint(named(machine)) == fingerprint(machine)
    assert Machine.from_json(fewer.to_json()) == fewer


def at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    """This machine is one of eight cards, of which the process sees what `value` says."""
    machine = machine_of("rtx-pro-6000-x8")
    monkeypatch.setattr(known, "probe", lambda: replace(machine, environment={VARIABLE: value}))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_plan_is_for_what_this_process_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at_hand(monkeypatch, tmp_path, "4,5,6,7")
    ran = metainfer("plan", "deepseek-v4-flash")
    assert ran.code == 0
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7: planned for 4 of 8 GPUs" in ran.out
    emitted = metainfer("plan", "deepseek-v4-flash", "--emit", "vllm").out
    assert "planned for 4 of 8 GPUs" in emitted
    assert "CUDA_VISIBLE_DEVICES=0" not in emitted
    # A name of a config is neither a directory nor a repository.
    assert "vllm serve MODEL " in emitted
    assert "# MODEL: a directory or repository with the weights of deepseek-v4-flash" in emitted
    named_machine = metainfer("plan", "deepseek-v4-flash", "--machine", "rtx-pro-6000-x8")
    assert "planned for" not in named_machine.out


def test_no_plan_where_this_process_sees_no_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at_hand(monkeypatch, tmp_path, "-1")
    ran = metainfer("plan", "deepseek-v4-flash")
    assert ran.code == 2 and "CUDA_VISIBLE_DEVICES=-1 shows none of 8 GPUs" in ran.err


@pytest.mark.parametrize(("value", "has"), [("0,,x", 1), ("0,1,9,2,3", 2)])
def test_a_command_has_the_cards_that_its_variable_shows(value: str, has: int) -> None:
    command = f"{VARIABLE}={value} vllm serve DeepSeek-V4-Flash -tp 4"
    ran = metainfer("plan", "--machine", "rtx-pro-6000-x4", "--from", command)
    assert ran.code == 2 and f"needs 4 GPUs (TP4) and has {has}" in ran.err
