"""Formats in which caches keep rows: plain facts, no code that runs.

A latent row is contiguous bytes, uint8 [row_bytes], a multiple of 16 so that gathers read it in
16-byte pieces. Index keys are two tensors, codes and scales, because products read them apart.

Codes:
    e4m3: one byte, at most 448, to nearest, ties to even, saturating; never NaN here.
    e2m1: half a byte, 0 .5 1 1.5 2 3 4 6 and a sign, the even channel in the low nibble; to
        nearest, ties to even, saturating.

Scales of one block of channels with the largest magnitude amax:
    e8m0: byte b means 2^(b - 127), 255 NaN: 2^ceil(log2(max(amax, floor) / largest code)).
    fp32: the same power of two as a float.
    e4m3: amax / 6 clipped to [2^-9, 448], rounded to e4m3.

A NaN makes the scale of its block NaN and all its codes zero: the whole block reads as NaN.
An infinity saturates: its code is the largest, and the scale as large as the formula says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

LARGEST_CODE = {"e4m3": 448.0, "e2m1": 6.0}
CODE_BITS = {"e4m3": 8, "e2m1": 4}
SCALE_BYTES = {"e8m0": 1, "e4m3": 1, "fp32": 4}

FP8_FLOOR = 1e-4
"""Smallest amax of e4m3 blocks."""
FP4_FLOOR = 6 * 2.0**-126
"""Smallest amax of e2m1 blocks with e8m0 scales: the scale is a normal fp32 number."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row of channels is kept as bytes.

    Attributes:
        name: as cases call it.
        width: channels of a row.
        coded: how many of the first channels are codes; the others are bf16.
        code: "e4m3" or "e2m1".
        block: coded channels per scale.
        scale: "e8m0", "fp32" or "e4m3".
        row_bytes: of a row, padding included; padding is zero.
        plain_at: offset of the bf16 channels in bytes; where there are none, the end of the codes.
        scales_at: offset of the scales in bytes.
        floor: smallest amax.
    """

    name: str
    width: int
    coded: int
    code: str
    block: int
    scale: str
    row_bytes: int
    plain_at: int
    scales_at: int
    floor: float

    @property
    def code_bytes(self) -> int:
        return self.coded * CODE_BITS[self.code] // 8

    @property
    def plain(self) -> int:
        """Channels that are bf16."""
        return self.width - self.coded

    @property
    def blocks(self) -> int:
        return self.coded // self.block

    @property
    def scale_bytes(self) -> int:
        return self.blocks * SCALE_BYTES[self.scale]

    @property
    def zeros(self) -> int:
        """Bytes of padding, behind the scales."""
        return self.row_bytes - self.code_bytes - 2 * self.plain - self.scale_bytes


@dataclass(frozen=True, slots=True)
class IndexFormat:
    """How an index key or query of `width` channels is kept: codes [code_bytes] and scales
    [scale_bytes], both uint8.

    Attributes: as those of `RowFormat`.
    """

    name: str
    width: int
    code: str
    block: int
    scale: str
    floor: float

    @property
    def code_bytes(self) -> int:
        return self.width * CODE_BITS[self.code] // 8

    @property
    def blocks(self) -> int:
        return self.width // self.block

    @property
    def scale_bytes(self) -> int:
        return self.blocks * SCALE_BYTES[self.scale]


V4_FP8 = RowFormat("v4_fp8", 512, 448, "e4m3", 64, "e8m0", 592, 448, 576, FP8_FLOOR)
"""V4 latents and entries: 448 e4m3, 64 bf16 (the rotated channels), 7 e8m0, 9 bytes of zero."""
V41_FP8 = RowFormat("v41_fp8", 512, 512, "e4m3", 32, "e8m0", 528, 512, 512, FP8_FLOOR)
"""V4.1 window: 512 e4m3, 16 e8m0."""
V41_FP4 = RowFormat("v41_fp4", 512, 512, "e2m1", 16, "e4m3", 288, 256, 256, 0.0)
"""V4.1 entries: 512 e2m1, 32 scales in e4m3."""
MLA_FP8 = RowFormat("mla_fp8", 576, 512, "e4m3", 128, "fp32", 656, 528, 512, FP8_FLOOR)
"""V3.2 and GLM-5: 512 e4m3, 4 fp32 powers of two, 64 bf16 (the rotated key)."""

FORMATS: Mapping[str, RowFormat] = MappingProxyType(
    {row.name: row for row in (V4_FP8, V41_FP8, V41_FP4, MLA_FP8)}
)
"""Formats of latents and entries by name. "dense", which is not here, is a plain tensor."""

INDEX_FP8 = IndexFormat("index_fp8", 128, "e4m3", 128, "fp32", FP8_FLOOR)
"""128 e4m3, one fp32 scale, a power of two."""
INDEX_FP4 = IndexFormat("index_fp4", 128, "e2m1", 32, "e8m0", FP4_FLOOR)
"""128 e2m1, 4 e8m0."""

INDEX_FORMATS: Mapping[str, IndexFormat] = MappingProxyType(
    {index.name: index for index in (INDEX_FP8, INDEX_FP4)}
)
"""Formats of index keys and queries by name."""
