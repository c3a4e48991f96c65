"""All operations by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from metainfer.ops import attention, compress, hc, index, linear, moe, norm, rope
from metainfer.ops.base import Op

OPS: Mapping[str, Op] = MappingProxyType(
    {
        op.name: op
        for module in (norm, rope, linear, hc, compress, index, attention, moe)
        for op in module.OPS
    }
)
