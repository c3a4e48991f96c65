"""Caches by rank: bytes of a block and of a sequence, by cache kind, on one stage of a pipeline.

Tokens of growing kinds are divided over the ranks of decode context parallel in blocks of
`BLOCK_TOKENS`; rings and compressor states are on every rank of the stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from metainfer.arch.attention import AttentionSide
from metainfer.arch.cache_kinds import CacheKind, Kind, Scope, blocks_for
from metainfer.arch.shapes import ModelShape
from metainfer.arch.side_caches import draft_kinds, kinds_of, sources_of
from metainfer.core.errors import UserError
from metainfer.ops.cache_formats import INDEX_WORDS, CacheFormats
from metainfer.ops.formats import FORMATS, INDEX_FORMATS
from metainfer.plan.layouts import RELEASED, Formats

_PLAIN = {"bf16": "bfloat16", "bfloat16": "bfloat16", "float32": "float32"}
_INDEX = {word: name for name, word in INDEX_WORDS.items()}
_FP8_ENTRIES = {"v41_fp4": "v41_fp8"}
"""Rows in e4m3 of models whose own entries have fewer bits."""

NAMES = {
    Kind.ENTRIES: "entries",
    Kind.INDEX_KEYS: "index keys",
    Kind.WINDOW: "window rings",
    Kind.COMPRESSOR: "compressor states",
    Kind.INDEX_COMPRESSOR: "compressor states",
}
DRAFT = "drafting caches"


@dataclass(frozen=True, slots=True)
class RowFormats:
    """Formats of rows: of windows, and of entries with index keys."""

    window: CacheFormats
    entries: CacheFormats

    def row_bytes(self, kind: CacheKind) -> int:
        formats = self.window if kind.kind is Kind.WINDOW else self.entries
        return formats.row_bytes(kind)


def row_formats(side: AttentionSide, formats: Formats) -> RowFormats:
    """Raises UserError for a word that is no format of this model's caches."""
    window, entries = side.window_format, side.entry_format
    if formats.latents in _PLAIN:
        window = entries = _PLAIN[formats.latents]
    elif formats.latents == "fp8":
        entries = _FP8_ENTRIES.get(entries, entries)
    elif formats.latents != RELEASED:
        raise _no_format(side, "latents", formats.latents, (RELEASED, "fp8", "bfloat16"))
    if formats.index_keys == RELEASED:
        keys = side.indexer.key_formats[0]
    elif formats.index_keys in _PLAIN:
        keys = _PLAIN[formats.index_keys]
    elif formats.index_keys in _INDEX:
        keys = _INDEX[formats.index_keys]
    else:
        raise _no_format(side, "index keys", formats.index_keys, (RELEASED, *_INDEX, "bfloat16"))
    _check_widths(side, window or entries, entries, keys)
    return RowFormats(CacheFormats(window or entries, keys), CacheFormats(entries, keys))


def _check_widths(side: AttentionSide, window: str, entries: str, keys: str) -> None:
    for name in (window, entries):
        if name in FORMATS and FORMATS[name].width != side.key_width:
            raise UserError(
                f"{name} keeps rows of {FORMATS[name].width} channels; those of {side.name} have"
                f" {side.key_width}",
                hint="keep latents in bfloat16",
            )
    if (
        keys in INDEX_FORMATS
        and side.choosers()
        and INDEX_FORMATS[keys].width != side.indexer.width
    ):
        raise UserError(
            f"{keys} keeps keys of {INDEX_FORMATS[keys].width} channels; those of {side.name} have"
            f" {side.indexer.width}",
            hint="keep index keys in bfloat16",
        )


def _no_format(side: AttentionSide, what: str, word: str, known: tuple[str, ...]) -> UserError:
    return UserError(
        f"{what} of {side.name} in {word}: there is no such format",
        hint="formats: " + ", ".join(known),
    )


@dataclass(frozen=True, slots=True)
class StageCaches:
    """Caches of one stage.

    Attributes:
        block_bytes: of a block of tokens, by name of the line.
        sequence_bytes: of the rings of a sequence, likewise.
    """

    block_bytes: dict[str, int]
    sequence_bytes: dict[str, int]

    @property
    def token_block(self) -> int:
        """Bytes of a block in all kinds."""
        return sum(self.block_bytes.values())

    @property
    def sequence(self) -> int:
        return sum(self.sequence_bytes.values())

    def lines(self, blocks: int, sequences: int) -> dict[str, int]:
        """Bytes by name for so many blocks on the rank, and sequences."""
        sums: Counter[str] = Counter()
        for name, size in self.block_bytes.items():
            sums[name] += blocks * size
        for name, size in self.sequence_bytes.items():
            sums[name] += sequences * size
        return {name: size for name, size in sums.items() if size}


def stage_caches(
    shape: ModelShape, formats: Formats, draft_rows: int, layers: range
) -> StageCaches:
    """Of the stage that has `layers`; the last one has the drafting blocks' too."""
    rows = row_formats(shape.side, formats)
    last = shape.num_layers - 1 in layers
    blocks: Counter[str] = Counter()
    sequences: Counter[str] = Counter()
    for name, kind in _kinds(shape, draft_rows > 0 and last, draft_rows, layers):
        size = kind.rows_per_block * rows.row_bytes(kind)
        (blocks if kind.scope is Scope.TOKENS else sequences)[name] += size
    return StageCaches(dict(blocks), dict(sequences))


def _kinds(
    shape: ModelShape, drafts: bool, draft_rows: int, layers: range
) -> Iterator[tuple[str, CacheKind]]:
    sources = sources_of(shape.side, layers)
    for kind in kinds_of(shape, draft_rows):
        growing = kind.scope is Scope.TOKENS
        if kind.source_layer in layers or (growing and kind.source_layer in sources):
            yield NAMES[kind.kind], kind
    if drafts:
        for kind in draft_kinds(shape, draft_rows):
            yield DRAFT, kind


def blocks_of_rank(tokens: int, kv_shards: int) -> int:
    """Blocks of a sequence of `tokens` tokens on the rank that has most of them."""
    return -(-blocks_for(tokens) // kv_shards)
