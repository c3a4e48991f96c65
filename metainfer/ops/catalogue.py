"""All operations by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from metainfer.ops import (
    attention,
    cache,
    compress,
    hc,
    index,
    index_codes,
    linear,
    moe,
    norm,
    quantise,
    rope,
    sample,
    step,
)
from metainfer.ops.base import Op

OPS: Mapping[str, Op] = MappingProxyType(
    {
        op.name: op
        for module in (
            norm,
            rope,
            quantise,
            linear,
            hc,
            compress,
            index_codes,
            index,
            attention,
            cache,
            moe,
            sample,
            step,
        )
        for op in module.OPS
    }
)
