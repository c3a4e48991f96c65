"""Formats by the names that cases use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16}
)
