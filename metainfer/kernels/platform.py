"""Platform: what runs kernels here, and as what: the CPU, a GPU natively, or a GPU that runs the
code of an older one from its PTX."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from metainfer.core.errors import UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.gpu.current import use_device
from metainfer.kernels.registry import Registry
from metainfer.ops.base import Target

_NAME = re.compile(r"sm_(\d+)(\d)")


@dataclass(frozen=True, slots=True)
class Platform:
    """Attributes:
    device: "cpu" or "cuda", where tensors are.
    target: of the code that runs there.
    registry: backends that start kernels for that target.
    name: of the processor.
    code_for: the older GPU whose code runs, such as "sm_89"; None natively.
    """

    device: str
    target: Target
    registry: Registry
    name: str
    code_for: str | None = None


def platform(device: str | None = None, code_for: str | None = None) -> Platform:
    """The platform of this machine.

    Args:
        device: "cpu", "cuda", or such as "cuda:1", which becomes the current GPU; None for the GPU
            where torch sees one.
        code_for: the GPU whose code is to run, such as "sm_89"; None for the one that is here.

    Raises:
        UserError: there is no such device, or it cannot run that code.
    """
    gpu = torch.cuda.is_available()
    device = device or ("cuda" if gpu else "cpu")
    if device == "cpu":
        if code_for is not None:
            raise UserError(f"a CPU does not run the code of {code_for}", hint="leave --as out")
        return Platform("cpu", Target("cpu"), builtin_registry(), "cpu")
    if not gpu:
        raise UserError("torch sees no GPU", hint="--device cpu runs the kernels of the CPU")
    use_device(device)
    here = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if code_for is None:
        return Platform("cuda", Target("cuda", here), builtin_registry(), name)
    wanted = parse_capability(code_for)
    if wanted > here:
        raise UserError(f"{name} is older than {code_for} and cannot run its code")
    from metainfer.kernels.triton.portable import PtxLauncher

    registry = builtin_registry(PtxLauncher(wanted))
    return Platform("cuda", Target("cuda", wanted), registry, name, code_for)


def parse_capability(name: str) -> tuple[int, int]:
    """ "sm_89" -> (8, 9). Raises UserError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(f"'{name}' is no GPU's code name", hint="they look like sm_89")
    return int(match[1]), int(match[2])
