"""Probe: looks at this machine and returns its Machine record. No torch."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from metainfer import __version__
from metainfer.hardware.cgroup import read_grant
from metainfer.hardware.gpus import read_gpus
from metainfer.hardware.host import read_cpu, read_memory
from metainfer.hardware.machine import Machine

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers")


def probe() -> Machine:
    """What can be learnt of this machine without loading anything heavy; does not raise."""
    root = Path("/")
    grant = read_grant(root)
    gpus, driver = read_gpus()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=read_cpu(root, grant),
        memory=read_memory(root, grant),
        gpus=gpus,
        driver=driver,
        versions=read_versions(),
    )


def read_versions() -> dict[str, str]:
    """Of metainfer, Python and the packages that are installed, without importing them."""
    found = {"metainfer": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
