"""Choices: in which formats caches and rows between ranks are kept, and how many tokens are
drafted, in the plans that a search compares.

Fewer bits change what a model predicts: in this engine they compete where `bench quality` passed
them, or where a flag asks for them. Drafting changes nothing that is said; it competes where the
engine drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from metainfer.arch.attention import AttentionSide
from metainfer.arch.record import WeightFormat
from metainfer.arch.shapes import ModelShape
from metainfer.core.config import flag
from metainfer.core.errors import UserError
from metainfer.ops.attention import DENSE
from metainfer.ops.cache_formats import CODED_KEYS, INDEX_DTYPES, INDEX_WORDS, LATENT_DTYPES, PLAIN
from metainfer.ops.formats import FORMATS
from metainfer.plan.kv_by_rank import row_formats
from metainfer.plan.layouts import RELEASED, Formats
from metainfer.plan.settings import FP8_NAMES
from metainfer.plan.speculation import check_draft, draft_counts

SELF = "metainfer"
"""The profile of this engine."""
DRAFTING = ("stock", "b12x", "pcie")
"""Profiles of engines that draft today."""
BF16_WIRE = "bf16"
WIRES = (BF16_WIRE, "fp8", "int8")


@dataclass(frozen=True, slots=True)
class FormatFlags:
    """What the user fixed; None leaves it to the search. Names after vLLM, aliases after SGLang."""

    kv_cache_dtype: str | None = flag(
        "--kv-cache-dtype",
        "Format of the caches of latents and compressed entries; released: as the model's vendor"
        " keeps them",
        choices=(*LATENT_DTYPES, RELEASED, *FP8_NAMES),
        parse=lambda text: "fp8" if text in FP8_NAMES else text,
    )
    index_cache_dtype: str | None = flag(
        "--index-cache-dtype", "Format of the indexer's keys", choices=INDEX_DTYPES
    )
    wire_dtype: str | None = flag(
        "--wire-dtype",
        "Format of activations of prompts that are added up between ranks; int8 has a scale for"
        " each block",
        choices=WIRES,
    )
    num_speculative_tokens: int | None = flag(
        "--num-speculative-tokens",
        "Tokens that the model's drafting blocks draft before each decode step; 0: none",
        aliases=("--speculative-num-steps",),
        unit="n",
    )


NO_FLAGS = FormatFlags()


class Proof(Protocol):
    """Formats of caches that a model may have (`plan.proof.CacheProof`)."""

    @property
    def latents(self) -> str: ...
    @property
    def index_keys(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Caches:
    """Formats, in the words of `layouts.Formats`."""

    latents: str = RELEASED
    index_keys: str = RELEASED

    def into(self, formats: Formats) -> Formats:
        return replace(formats, latents=self.latents, index_keys=self.index_keys)


@dataclass(frozen=True, slots=True)
class Choices:
    """What a search tries.

    Attributes:
        caches: the plainest first.
        wires: of `WIRES`.
        drafts: tokens drafted before a step, the fewest first.
    """

    caches: tuple[Caches, ...] = (Caches(),)
    wires: tuple[str, ...] = (BF16_WIRE,)
    drafts: tuple[int, ...] = (0,)


def choices_of(
    shape: ModelShape, engine: str, flags: FormatFlags = NO_FLAGS, proofs: Sequence[Proof] = ()
) -> Choices:
    """What is allowed to compete.

    Args:
        engine: name of a profile.
        proofs: of `bench quality`, for this model.

    Raises UserError for flags that contradict the model.
    """
    own = engine == SELF
    caches = [_plain(shape) if own else Caches()]
    caches += [Caches(one.latents, one.index_keys) for one in proofs if own]
    caches = _fixed(caches, flags)
    _check_keys(shape.side, flags.index_cache_dtype)
    for one in caches:
        row_formats(shape.side, one.into(Formats()))  # raises for widths that have no such rows
    drafts: tuple[int, ...] = (0, *draft_counts(shape)) if engine in DRAFTING else (0,)
    if flags.num_speculative_tokens is not None:
        check_draft(shape, flags.num_speculative_tokens)
        drafts = (flags.num_speculative_tokens,)
    wires = (BF16_WIRE,) if flags.wire_dtype is None else (flags.wire_dtype,)
    return Choices(tuple(dict.fromkeys(caches)), wires, drafts)


def _plain(shape: ModelShape) -> Caches:
    """Without a proof: the format that a GPU computes in, of index keys where the model has them
    so."""
    word = "float32" if shape.quantisation.linear is WeightFormat.F32 else "bfloat16"
    return Caches(word, word if DENSE in shape.side.indexer.key_formats else CODED_KEYS)


def _check_keys(side: AttentionSide, word: str | None) -> None:
    """Raises UserError where index keys of the model have no such form."""
    known = side.indexer.key_formats
    has = [
        *(PLAIN if DENSE in known else ()),
        *(INDEX_WORDS[form] for form in known if form in INDEX_WORDS),
    ]
    if word is not None and side.choosers() and word not in has:
        raise UserError(
            f"--index-cache-dtype {word}: index keys of {side.name} have no such form",
            hint=f"they have {', '.join(has)}",
        )


def _fixed(caches: Sequence[Caches], flags: FormatFlags) -> list[Caches]:
    """Those that flags allow; where none does, what flags say, the rest as the engine has it."""
    latents, keys = flags.kv_cache_dtype, flags.index_cache_dtype
    fitting = [
        one for one in caches if latents in (None, one.latents) and keys in (None, one.index_keys)
    ]
    if fitting:
        return fitting
    kept = latents or caches[0].latents
    return [Caches(kept, keys or (kept if kept in PLAIN else CODED_KEYS))]


def smaller_caches(shape: ModelShape, choices: Choices) -> tuple[Caches, ...]:
    """Of fewer bits than any that competes, and that the model's rows fit into: coded latents with
    keys of a byte, with keys of half a byte, and as the vendor keeps them where that is less."""
    side = shape.side
    known = {words(side, one) for one in choices.caches}
    keys = [CODED_KEYS]
    if side.choosers():
        keys += [
            INDEX_WORDS[form]
            for form in side.indexer.coded_formats
            if INDEX_WORDS[form] != CODED_KEYS
        ]
    found: dict[tuple[str, str], Caches] = {}
    for latents in ("fp8", RELEASED):
        for key in keys if latents == "fp8" else keys[-1:]:
            one = Caches(latents, key)
            if _fits_rows(side, one) and words(side, one) not in known:
                found.setdefault(words(side, one), one)
    return tuple(found.values())


def _fits_rows(side: AttentionSide, caches: Caches) -> bool:
    try:
        row_formats(side, caches.into(Formats()))
    except UserError:
        return False
    return True


def words(side: AttentionSide, caches: Caches) -> tuple[str, str]:
    """How entries, and index keys, are kept: of equal words all bytes are equal."""
    rows = row_formats(side, caches.into(Formats())).entries
    return rows.latents, rows.index_keys


_CODES = {"e4m3": "fp8", "e2m1": "fp4"}
_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def caches_text(shape: ModelShape, formats: Formats) -> str:
    """Such as "caches bf16, index keys fp8"."""
    entries, keys = words(shape.side, Caches(formats.latents, formats.index_keys))
    latents = _SHORT.get(entries) or _CODES[FORMATS[entries].code]
    if not shape.side.choosers():
        return f"caches {latents}"
    return f"caches {latents}, index keys {_SHORT.get(keys) or INDEX_WORDS[keys]}"


def in_caches(shape: ModelShape, caches: Caches) -> ModelShape:
    """The model with caches that keep its rows so."""
    side = shape.side
    rows = row_formats(side, caches.into(Formats()))
    index = replace(side.indexer, key_formats=(rows.entries.key_format,))
    window = rows.window.latent_format if side.window else side.window_format
    kept = replace(
        side, window_format=window, entry_format=rows.entries.latent_format, indexer=index
    )
    return replace(shape, side=kept)
