"""How the caches of a model keep their rows: latents and entries in one format, index keys in one.

A plan and its flags say "fp8"; which bytes that is depends on the model (`ops/formats.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from metainfer.arch.attention import KEPT_KEYS
from metainfer.arch.cache_kinds import CacheKind, Kind
from metainfer.arch.record import Arch, LayerKind
from metainfer.core.errors import UserError
from metainfer.ops.base import ELEMENT_BYTES
from metainfer.ops.cache import DENSE
from metainfer.ops.formats import FORMATS, INDEX_FORMATS, INDEX_FP4, INDEX_FP8, V4_FP8

PLAIN = ("float32", "bfloat16")
"""Caches of plain numbers."""
LATENT_DTYPES = (*PLAIN, "fp8")
INDEX_DTYPES = (*PLAIN, "fp8", "fp4")
INDEX_WORDS: Mapping[str, str] = MappingProxyType({"index_fp8": "fp8", "index_fp4": "fp4"})
"""Of coded index keys, what a plan and its flags say."""
CODED_KEYS = INDEX_WORDS[KEPT_KEYS]
"""Of index keys beside coded latents, where nothing says otherwise."""


@dataclass(frozen=True, slots=True)
class CacheFormats:
    """Attributes:
    latents: of latents and entries: one of `PLAIN` or a name of `formats.FORMATS`.
    index_keys: one of `PLAIN` or a name of `formats.INDEX_FORMATS`.
    """

    latents: str
    index_keys: str

    @property
    def latent_format(self) -> str:
        """As cases name it, for which all plain numbers are dense."""
        return DENSE if self.latents in PLAIN else self.latents

    @property
    def key_format(self) -> str:
        """Likewise, of index keys."""
        return DENSE if self.index_keys in PLAIN else self.index_keys

    def row_bytes(self, kind: CacheKind) -> int:
        """Bytes of a row of `kind`."""
        if kind.fp32:
            return 4 * kind.row_width
        if kind.kind is Kind.INDEX_KEYS:
            if self.index_keys in PLAIN:
                return ELEMENT_BYTES[self.index_keys] * kind.row_width
            form = INDEX_FORMATS[self.index_keys]
            return form.code_bytes + form.scale_bytes
        if self.latents in PLAIN:
            return ELEMENT_BYTES[self.latents] * kind.row_width
        return FORMATS[self.latents].row_bytes


FP32_CACHES = CacheFormats("float32", "float32")


def cache_formats(arch: Arch, latents: str, index_keys: str) -> CacheFormats:
    """The formats of `arch` by the words of a plan: one of `LATENT_DTYPES`, one of `INDEX_DTYPES`.

    Raises UserError where rows of the model do not fit into a format.
    """
    kept, keys = latents, index_keys
    if latents == "fp8":
        has, wants = (arch.head_dim, arch.rope_head_dim), (V4_FP8.width, V4_FP8.plain)
        if has != wants:
            raise UserError(
                f"--kv-cache-dtype fp8 keeps latents of {wants[0]} channels, {wants[1]} of them"
                f" rotated; those of {arch.name} have {has[0]}, {has[1]} of them rotated",
                hint="give --kv-cache-dtype bfloat16",
            )
        kept = V4_FP8.name
    if index_keys not in PLAIN:
        form = INDEX_FP4 if index_keys == "fp4" else INDEX_FP8
        chooses = any(layer.kind is LayerKind.COMPRESSED_SPARSE for layer in arch.layers)
        if chooses and arch.index_head_dim != form.width:
            raise UserError(
                f"--index-cache-dtype {index_keys} keeps index keys of {form.width} channels;"
                f" those of {arch.name} have {arch.index_head_dim}",
                hint="give --index-cache-dtype bfloat16",
            )
        keys = form.name
    return CacheFormats(kept, keys)
