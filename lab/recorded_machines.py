"""Writes the recorded machines, metainfer/hardware/machines/*.json, from the tables of lab/machines.

    PYTHONPATH=. python lab/recorded_machines.py [--check]

With --check nothing is written; exit code 1 where a file is not what this would write.

A figure stands beside its source; what is arithmetic or was concluded says so. Of several curves of
the same means, operation and GPUs the first is the one that fits the machine best.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from lab.machines.nvlink import b300, h200
from lab.machines.pcie import a100, l20, l40s, rtx_4090, rtx_5070ti
from lab.machines.rtx_pro import d6000_x8, pro_few, pro_two_sockets, pro_x8
from metainfer.hardware.facts import plain
from metainfer.hardware.machine import MACHINE_VERSION, Machine, Unknown

OUT = Path(__file__).parents[1] / "metainfer/hardware/machines"

MACHINES = {
    "rtx-pro-6000-x8": pro_x8,
    "rtx-pro-6000-x8-two-sockets": pro_two_sockets,
    "rtx-pro-6000-x4": lambda: pro_few(4),
    "rtx-pro-6000-x2": lambda: pro_few(2),
    "rtx-6000d-x8": d6000_x8,
    "l40s-x8": lambda: l40s(8),
    "l40s-x4": lambda: l40s(4),
    "rtx-4090-x4": rtx_4090,
    "rtx-5070ti-x2": rtx_5070ti,
    "a100-pcie-x8": a100,
    "l20-x8": l20,
    "h200-x1": h200,
    "b300-x8": b300,
}


def written(one: Machine) -> str:
    """Its JSON: what is as it would be by itself left out, one record a line."""
    lines = [f'"version": {MACHINE_VERSION}']
    for name, value in short(one).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n    ".join(json.dumps(row) for row in value)
            lines.append(f'"{name}": [\n    {rows}\n  ]')
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def short(record: Any) -> Any:
    """`plain` without the fields that have their default."""
    if isinstance(record, tuple):
        return [short(item) for item in record]
    if isinstance(record, Unknown) or not hasattr(record, "__dataclass_fields__"):
        return plain(record)
    values = {f.name: getattr(record, f.name) for f in fields(record) if not is_default(record, f)}
    return {name: short(value) for name, value in values.items()}


def is_default(record: Any, f: Any) -> bool:
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    return default is not MISSING and getattr(record, f.name) == default


def main() -> int:
    check = "--check" in sys.argv[1:]
    wrong = [path.stem for path in OUT.glob("*.json") if path.stem not in MACHINES]
    for name, make in MACHINES.items():
        path, text = OUT / f"{name}.json", written(make())
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            wrong.append(name)
    if wrong:
        print("not as written by lab/recorded_machines.py: " + ", ".join(sorted(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
