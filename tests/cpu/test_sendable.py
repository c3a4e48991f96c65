"""What leaves the house: nothing that tells who and where it is, all else as it was."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.bench.sendable import Discretion
from metainfer.hardware.machine import Machine, Process
from tests.fakes.machines import two_sockets

HERE = Discretion.here({Path("/data/of alice/secret-model"): "secret-model"})


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("no file /home/alice/models/v4/config.json: gone", "no file config.json: gone"),
        ("look in ~/.cache/metainfer, or ../alice/x", "look in metainfer, or x"),
        ("/data/of alice/secret-model/a.safetensors", "secret-model/a.safetensors"),
        ('File "/usr/lib/torch/a.py", line 3', 'File "a.py", line 3'),
        ("--plan=/tmp/alice/plan.json", "--plan=plan.json"),
        (f"on {socket.gethostname()}: down", "on (host): down"),
        ("from 192.168.3.44:29500", "from (not shown):29500"),
        ("02:42:ac:11:00:02", "(not shown)"),
        ("GPU-8d2c1f00-0a1b-2c3d-4e5f-00112233aabb of 8", "(not shown) of 8"),
    ],
)
def test_what_tells_who_and_where(told: str, shown: str) -> None:
    assert HERE.text(told) == shown


@pytest.mark.parametrize(
    "told",
    [
        "227,091 tokens/s, 1/4 and 1/128, and/or",
        "0000:41:00.0 at root port 0000:40:01.1",
        "torch 2.13.0+cu130, driver 580.159.04",
        "github.com/NVIDIA/nccl 2.30.7, https://example.org/a/b",
        "hc.mix=composed;norm.rms_norm=composed",
        "SHA of 3f2a9c00d1",
    ],
)
def test_all_else_is_as_it_was(told: str) -> None:
    assert HERE.text(told) == told


def test_a_record_of_a_machine_stays_one() -> None:
    machine = two_sockets()
    assert isinstance(machine.gpus, tuple)
    first, *others = machine.gpus
    known = replace(first, uuid="GPU-1", processes=(Process(7, "python alice.py", 5),))
    environment = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_COMM_ID": "alice-box:29500",
        "NCCL_TOPO_FILE": "topology",
        "CUDA_HOME": "/usr/local/cuda",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NCCL_SOCKET_IFNAME": "a host of alice",
    }
    machine = replace(machine, gpus=(known, *others), environment=environment)
    shown = HERE.record(json.loads(machine.to_json()))
    assert not {"uuid", "processes"} & shown["gpus"][0].keys()
    assert shown["environment"] == environment | {
        "NCCL_COMM_ID": "(not shown)",
        "NCCL_TOPO_FILE": "(not shown)",
        "CUDA_HOME": "(not shown)",
        "NCCL_SOCKET_IFNAME": "(not shown)",
    }
    read = Machine.from_json(json.dumps(shown))
    assert read.bridges == machine.bridges and read.cpu == machine.cpu
    assert read.gpus == (first, *others)


def test_commands_and_hashes_of_parts_go_and_numbers_stay() -> None:
    told = {"command": ["metainfer", "verify", "/x"], "sha256": "ab", "cases": [{"seconds": 1.5}]}
    assert HERE.record(told) == {"cases": [{"seconds": 1.5}]}
    assert HERE.record({"a": None, "b": [True, ("/x/y", 2)]}) == {"a": None, "b": [True, ["y", 2]]}
