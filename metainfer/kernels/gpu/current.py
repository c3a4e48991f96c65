"""The current GPU: kernels of Triton, modules of CUDA and streams go to that of the thread which
starts them, wherever their tensors are."""

from __future__ import annotations

import torch

from metainfer.core.errors import UserError
from metainfer.hardware.device_names import gpu_number


def use_device(name: str) -> None:
    """Make the GPU that `name` names the calling thread's; of other devices nothing is to be done.

    Raises UserError where torch sees no such GPU.
    """
    number = gpu_number(name)
    if number is None:
        return
    count = torch.cuda.device_count()
    if number >= count:
        raise UserError(
            f"torch sees {count} GPUs here, and none is {name}",
            hint=f"name one below cuda:{count}" if count else "leave --device out",
        )
    torch.cuda.set_device(number)
