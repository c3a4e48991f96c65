"""Probe: looks at this machine and returns its Machine record. No torch."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from metainfer import __version__
from metainfer.core.env import inherited
from metainfer.hardware.cgroup import read_grant
from metainfer.hardware.gpus import read_gpus
from metainfer.hardware.host import read_cpu, read_host, read_memory
from metainfer.hardware.machine import Bridge, Machine, Unknown
from metainfer.hardware.pci_tree import read_tree

_INHERITED = ("NCCL_", "CUDA_", "PYTORCH_", "TORCH_", "TRITON_", "VLLM_", "SGLANG_", "OMP_")
_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers",
             "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cutlass-dsl", "flashinfer-python",
             "vllm", "sglang")  # fmt: skip
"""Those of other engines too: the doctor knows versions of them that are bad together."""


def probe() -> Machine:
    """What can be learnt of this machine without loading anything heavy; does not raise."""
    root = Path("/")
    grant = read_grant(root)
    listing = read_gpus(root)
    gpus = listing.gpus
    bridges: tuple[Bridge, ...] | Unknown = Unknown("no GPU is known")
    if not isinstance(gpus, Unknown):
        gpus, bridges = read_tree(root, gpus)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=read_cpu(root, grant),
        memory=read_memory(root, grant),
        gpus=gpus,
        driver=listing.driver,
        versions=read_versions(),
        host=read_host(root),
        bridges=bridges,
        peers=listing.peers,
        nvlink=listing.nvlink,
        environment=inherited(_INHERITED),
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
