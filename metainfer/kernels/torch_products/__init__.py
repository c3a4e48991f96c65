"""Products that torch hands to cuBLAS: backends named "torch".

They serve many rows; few go to the Triton kernels, which are prepared from the same weights.
"""

from __future__ import annotations

from metainfer.kernels.registry import Backend
from metainfer.kernels.torch_products import dense, scaled
from metainfer.kernels.triton.launch import Launcher


def torch_backends(launch: Launcher) -> tuple[Backend, ...]:
    """None where kernels are to run as the code of an older GPU: torch would run that of this
    one."""
    if launch.portable:
        return ()
    return tuple(declared.bind(launch) for declared in (*dense.BACKENDS, *scaled.BACKENDS))
