"""Platform: what runs kernels here, and as what: the CPU, a GPU natively, or a GPU that runs the
code of an older one from its PTX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from metainfer.core.errors import UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.gpu.compilations import Compilations
from metainfer.kernels.gpu.current import use_device
from metainfer.kernels.registry import Registry
from metainfer.ops.base import Target
from metainfer.ops.targets import parse_portable

if TYPE_CHECKING:
    from metainfer.kernels.triton.launch import Launcher


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
    wanted = parse_portable(code_for)
    if wanted > here:
        raise UserError(f"{name} is older than {code_for} and cannot run its code")
    registry = builtin_registry(launcher(code_for))
    return Platform("cuda", Target("cuda", wanted), registry, name, code_for)


def launcher(
    code_for: str | None = None, compilations: Compilations | None = None
) -> Launcher | None:
    """What starts kernels on torch's current GPU: natively, or as the code of an older one; None
    where torch sees no GPU.

    Args:
        code_for: as of `platform`.
        compilations: told of every kernel that is started for the first time.

    Raises:
        UserError: no newer GPU runs that code.
    """
    if not torch.cuda.is_available():
        return None
    # Triton takes a while to import, and needs not be installed where there is no GPU.
    from metainfer.kernels.triton.launch import JitLauncher
    from metainfer.kernels.triton.portable import PtxLauncher

    if code_for is None:
        return JitLauncher(compilations=compilations)
    return PtxLauncher(parse_portable(code_for), compilations=compilations)
