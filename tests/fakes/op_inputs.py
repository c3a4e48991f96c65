"""Inputs for every op at any of its cases: what generic tests of backends run.

Each op has named variants: row counts, rows that lie apart, empty lists, garbage where nobody may
look, ties. `make` is deterministic: the same name gives the same numbers, in memory of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Call:
    """One call of an op: what `prepare` and what `run` take after the case."""

    weights: tuple[Any, ...]
    arguments: tuple[Any, ...]


class Draw:
    """Seeded random tensors on one device."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: str = "float32", scale: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self._generator) * scale
        return numbers.to(self.device, DTYPES[dtype])

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)

    def distinct(self, rows: int, count: int, below: int) -> torch.Tensor:
        """[rows, count] different integers below `below` in each row, in any order."""
        order = torch.rand(rows, below, generator=self._generator).argsort(dim=1)
        return order[:, :count].contiguous().to(self.device)

    def rotation(self, rows: int, width: int) -> torch.Tensor:
        angle = self.normal(rows, width // 2, scale=3.0)
        return torch.stack([angle.cos(), angle.sin()], dim=-1)

    def fp8(self, *shape: int) -> torch.Tensor:
        """Every finite e4m3 code, subnormals and both zeros included."""
        magnitudes = self.integers(0, 127, *shape)
        signs = self.integers(0, 2, *shape) * 128
        return (magnitudes + signs).to(torch.uint8).view(torch.float8_e4m3fn)

    def scales(self, *shape: int, kind: str = "e8m0", middle: int = 119) -> torch.Tensor:
        """Scales around 2^(middle - 127), as bytes or as fp32 that are no powers of two."""
        if kind == "e8m0":
            return self.integers(middle - 3, middle + 3, *shape).to(torch.uint8)
        return self.normal(*shape, scale=0.3).exp() * 2.0 ** (middle - 127)


def apart(dense: torch.Tensor) -> torch.Tensor:
    """The same numbers with garbage between the rows."""
    gap = torch.full((len(dense), 8, *dense.shape[2:]), torch.nan, device=dense.device)
    return torch.cat([gap.to(dense.dtype), dense, gap.to(dense.dtype)], dim=1)[:, 8:-8]


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _garbage_but(listed: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """NaN in every row of a cache that no list names."""
    named = torch.zeros(len(cache), dtype=torch.bool, device=cache.device)
    named[listed[listed >= 0]] = True
    cache[~named] = torch.nan
    return cache


def _rms_norm(case: Any, draw: Draw, rows: int, dtype: str = "", spread: bool = False) -> Call:
    x_TD = draw.normal(rows, case.width, dtype=dtype or case.dtype, scale=3.0)
    x_TD[: rows // 3] *= 1e-3  # the eps matters here
    return Call((), (apart(x_TD) if spread else x_TD, draw.normal(case.width)))


def _rotate(case: Any, draw: Draw, rows: int, spread: bool = False) -> Call:
    x_THD = draw.normal(rows, case.heads, case.width, dtype=case.dtype)
    return Call((), (apart(x_THD) if spread else x_THD, draw.rotation(rows, case.rope_width)))


def _norm_rotate(case: Any, draw: Draw, rows: int, spread: bool = False) -> Call:
    x_THD, rotation_TR2 = _rotate(case, draw, rows, spread).arguments
    weight_D = draw.normal(case.width) if case.weighted else None
    return Call((), (x_THD, weight_D, rotation_TR2))


def _dense(case: Any, draw: Draw, rows: int, dtype: str = "", spread: bool = False) -> Call:
    weight_OI = draw.normal(case.rows, case.columns, dtype=dtype or case.dtype)
    x_TI = draw.normal(rows, case.columns, dtype=case.dtype)
    return Call((weight_OI,), (apart(x_TI) if spread else x_TI,))


def _quantised(case: Any, draw: Draw, rows: int, columns: int, scales: str) -> tuple[Any, ...]:
    blocks = ceil_div(rows, case.block[0]), ceil_div(columns, case.block[1])
    return draw.fp8(rows, columns), draw.scales(*blocks, kind=scales)


def _fp8_block(
    case: Any, draw: Draw, rows: int, scales: str = "e8m0", spread: bool = False
) -> Call:
    weights = _quantised(case, draw, case.rows, case.columns, scales)
    x_TI = draw.normal(rows, case.columns, dtype=case.dtype)
    return Call(weights, (apart(x_TI) if spread else x_TI,))


def _grouped(case: Any, draw: Draw, rows: int, scales: str = "e8m0", dtype: str = "") -> Call:
    outputs = case.groups * case.rows
    x_TGI = draw.normal(rows, case.groups, case.columns, dtype=case.dtype)
    if case.weight_format == "fp8_block":
        return Call(_quantised(case, draw, outputs, case.columns, scales), (x_TGI,))
    return Call((draw.normal(outputs, case.columns, dtype=dtype or case.dtype),), (x_TGI,))


def _streams(case: Any, draw: Draw, rows: int) -> torch.Tensor:
    return draw.normal(rows, case.streams, case.width, dtype=case.stream_dtype)


def _mix(case: Any, draw: Draw, rows: int, sharpness: float = 1.0) -> Call:
    mixes, numbers = (2 + case.streams) * case.streams, case.streams * case.width
    fn_MK = draw.normal(mixes, numbers, scale=numbers**-0.5)
    scale_3 = draw.normal(3).abs() * sharpness
    return Call((fn_MK, draw.normal(mixes), scale_3), (_streams(case, draw, rows),))


def _expand(case: Any, draw: Draw, rows: int, dtype: str = "") -> Call:
    y_TD = draw.normal(rows, case.width, dtype=dtype or case.dtype)
    post_TS = draw.normal(rows, case.streams)
    comb_TSS = draw.normal(rows, case.streams, case.streams).softmax(-1)
    return Call((), (_streams(case, draw, rows), y_TD, post_TS, comb_TSS))


def _head(case: Any, draw: Draw, rows: int) -> Call:
    numbers = case.streams * case.width
    fn_SK = draw.normal(case.streams, numbers, scale=numbers**-0.5)
    return Call((fn_SK, draw.normal(case.streams), draw.normal(1)), (_streams(case, draw, rows),))


def _compress(case: Any, draw: Draw, entries: int, first: int, sharpness: float = 1.0) -> Call:
    rows_NW = draw.normal((entries + case.overlap) * case.ratio, case.row_width, scale=sharpness)
    if case.overlap and first == 0:
        rows_NW[: case.ratio] = torch.nan
    rotation_ER2 = draw.rotation(entries, case.rope_width)
    return Call((), (apart(rows_NW), first, draw.normal(case.width), rotation_ER2))


def _compress_decode(case: Any, draw: Draw, entries: int) -> Call:
    ring_NW = draw.normal((entries + 2) * case.span, case.row_width)
    ring_rows_CS = draw.distinct(1, entries * case.span, len(ring_NW)).view(entries, case.span)
    if case.overlap:
        ring_rows_CS[::2, : case.ratio] = -1  # the first window of a sequence
    _garbage_but(ring_rows_CS, ring_NW)
    rotation_CR2 = draw.rotation(entries, case.rope_width)
    return Call((), (ring_NW, ring_rows_CS, draw.normal(case.width), rotation_CR2))


def _index_queries(
    case: Any, draw: Draw, rows: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and head weights. "ties": one head with a weight and small whole numbers, so that
    many scores are exactly equal in any order of summation."""
    if kind == "normal":
        q_THI = draw.normal(rows, case.heads, case.width, dtype=case.dtype)
        return q_THI, apart(draw.normal(rows, case.heads))
    q_THI = draw.integers(-1, 2, rows, case.heads, case.width).to(DTYPES[case.dtype])
    weights_TH = torch.zeros(rows, case.heads, device=draw.device)
    weights_TH[:, 1] = draw.integers(-1, 2, rows).float()
    return q_THI, apart(weights_TH)


def _index_keys(case: Any, draw: Draw, rows: int, kind: str, dtype: str) -> torch.Tensor:
    if kind == "normal":
        return draw.normal(rows, case.width, dtype=dtype or case.dtype)
    keys_MI = draw.integers(-1, 2, rows, case.width).to(DTYPES[dtype or case.dtype])
    if kind == "nan":
        keys_MI[draw.integers(0, rows, rows // 3)] = torch.nan
    return keys_MI


def _index_topk(
    case: Any,
    draw: Draw,
    rows: int,
    start: int,
    entries: int | None = None,
    kind: str = "normal",
    dtype: str = "",
) -> Call:
    entries = (start + rows) // case.ratio if entries is None else entries
    q_THI, weights_TH = _index_queries(case, draw, rows, kind)
    keys_MI = _index_keys(case, draw, entries + 5, kind, dtype)
    key_rows_E = draw.distinct(1, entries, entries + 5)[0]
    _garbage_but(key_rows_E, keys_MI)
    return Call((), (q_THI, weights_TH, keys_MI, key_rows_E, start))


def _index_topk_decode(
    case: Any, draw: Draw, rows: int, entries: int, kind: str = "normal", dtype: str = ""
) -> Call:
    q_THI, weights_TH = _index_queries(case, draw, rows, kind)
    keys_MI = _index_keys(case, draw, rows * entries + 5, kind, dtype)
    key_rows_TE = draw.distinct(1, rows * entries, len(keys_MI)).view(rows, entries)
    seen_T1 = draw.integers(0, entries + 1, rows, 1)
    seen_T1[:1] = entries
    seen_T1[2:3] = 0  # a row that sees nothing
    key_rows_TE[torch.arange(entries, device=draw.device) >= seen_T1] = -1
    _garbage_but(key_rows_TE, keys_MI)
    return Call((), (q_THI, weights_TH, keys_MI, key_rows_TE))


def _sparse_prefill(
    case: Any,
    draw: Draw,
    rows: int,
    start: int,
    halo: int | None = None,
    sharpness: float = 1.0,
    dtype: str = "",
    select: bool = True,
) -> Call:
    halo = min(start, case.window - 1) if halo is None else halo
    q_THD = draw.normal(rows, case.heads, case.width, dtype=case.dtype, scale=sharpness)
    latents_ND = draw.normal(halo + rows, case.width, dtype=case.dtype)
    sink_H = draw.normal(case.heads, scale=2.0)
    if case.ratio == 0:
        return Call((), (q_THD, latents_ND, start, sink_H, None, None, None))
    entries = (start + rows) // case.ratio
    entries_MD = draw.normal(entries + 6, case.width, dtype=dtype or case.dtype)
    entry_rows_E = draw.distinct(1, entries, entries + 6)[0]
    _garbage_but(entry_rows_E, entries_MD)
    selected_TK = None
    if case.topk and select:
        # Any of the entries that a row sees, in any order, with gaps; the second row has none.
        selected_TK = draw.distinct(rows, case.topk, max(entries, case.topk))
        seen_T1 = (torch.arange(start, start + rows, device=draw.device)[:, None] + 1) // case.ratio
        selected_TK[(selected_TK >= seen_T1) | (draw.integers(0, 4, rows, case.topk) == 0)] = -1
        selected_TK[1:2] = -1
    return Call((), (q_THD, latents_ND, start, sink_H, entries_MD, entry_rows_E, selected_TK))


def _sparse_decode(
    case: Any,
    draw: Draw,
    rows: int,
    columns: int | None = None,
    full: bool = False,
    sharpness: float = 1.0,
    dtype: str = "",
) -> Call:
    q_THD = draw.normal(rows, case.heads, case.width, dtype=case.dtype, scale=sharpness)
    sink_H = draw.normal(case.heads, scale=2.0)
    ring = _listed_rows(case, draw, rows, case.window, full, dtype)
    if case.ratio == 0:
        return Call((), (q_THD, *ring, sink_H, None, None))
    columns = (case.topk or 7) if columns is None else columns
    return Call((), (q_THD, *ring, sink_H, *_listed_rows(case, draw, rows, columns, full, dtype)))


def _listed_rows(
    case: Any, draw: Draw, rows: int, columns: int, full: bool, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache and lists of its rows; -1 in any place, everywhere in the third list."""
    cache_ND = draw.normal(rows * columns + 9, case.width, dtype=dtype or case.dtype)
    listed_TK = draw.distinct(1, rows * columns, len(cache_ND)).view(rows, columns)
    if not full:
        listed_TK[draw.integers(0, 3, rows, columns) == 0] = -1
        listed_TK[2:3] = -1
    return _garbage_but(listed_TK, cache_ND), listed_TK


def _route_learned(case: Any, draw: Draw, rows: int, dtype: str = "float32") -> Call:
    gate_ED = draw.normal(case.experts, case.width, dtype=dtype, scale=case.width**-0.5)
    x_TD = draw.normal(rows, case.width, dtype=case.dtype)
    return Call((gate_ED, draw.normal(case.experts, scale=0.5)), (x_TD,))


def _route_hash(case: Any, draw: Draw, rows: int, dtype: str = "float32") -> Call:
    (gate_ED, _), (x_TD,) = (c := _route_learned(case, draw, rows, dtype)).weights, c.arguments
    table_VK = draw.distinct(50, case.selected, case.experts)
    return Call((gate_ED, table_VK), (x_TD, draw.integers(0, 50, rows)))


def _expert_weight(
    case: Any, draw: Draw, rows: int, columns: int, scales: str
) -> tuple[torch.Tensor, ...]:
    if case.weight_format == "dense":
        weight = draw.normal(case.experts, rows, columns, dtype=case.dtype, scale=columns**-0.5)
        return (weight,)
    if case.weight_format == "fp8_block":
        blocks = ceil_div(rows, case.block[0]), ceil_div(columns, case.block[1])
        scale = draw.scales(case.experts, *blocks, kind=scales, middle=117)
        return draw.fp8(case.experts, rows, columns), scale
    packed = draw.integers(0, 256, case.experts, rows, columns // 2).to(torch.uint8)
    return packed, draw.scales(case.experts, rows, columns // 32, middle=122)


def _experts(
    case: Any,
    draw: Draw,
    rows: int,
    same: bool = False,
    repeated: bool = False,
    scales: str = "e8m0",
) -> Call:
    weights = (
        _expert_weight(case, draw, case.inner, case.width, scales),
        _expert_weight(case, draw, case.width, case.inner, scales),
        _expert_weight(case, draw, case.inner, case.width, scales),
    )
    x_TD = draw.normal(rows, case.width, dtype=case.dtype)
    ids_TK = draw.distinct(rows, case.selected, case.experts)
    if same:
        ids_TK = ids_TK[:1].expand(rows, -1).contiguous()
    if repeated:
        ids_TK[::2, 1] = ids_TK[::2, 0]
    weights_TK = draw.normal(rows, case.selected).abs()
    weights_TK[1:2, 0] = 0.0
    return Call(weights, (x_TD, ids_TK, weights_TK))


def _swiglu(case: Any, draw: Draw, rows: int) -> Call:
    return Call((), (draw.normal(rows, 2 * case.inner, dtype=case.dtype, scale=2.0),))


Maker = Callable[[Any, Draw], Call]


def _rows(maker: Callable[..., Call], *counts: int, **fixed: Any) -> dict[str, Maker]:
    return {f"{count} rows": partial(maker, rows=count, **fixed) for count in counts}


VARIANTS: Mapping[str, Mapping[str, Maker]] = {
    "norm.rms_norm": {
        **_rows(_rms_norm, 0, 1, 7),
        "rows apart": partial(_rms_norm, rows=5, spread=True),
        "fp32 in": partial(_rms_norm, rows=5, dtype="float32", spread=True),
        "bf16 in": partial(_rms_norm, rows=5, dtype="bfloat16"),
    },
    "rope.rotate": {
        **_rows(_rotate, 0, 1, 7),
        "rows apart": partial(_rotate, rows=5, spread=True),
    },
    "rope.norm_rotate": {
        **_rows(_norm_rotate, 0, 1, 7),
        "rows apart": partial(_norm_rotate, rows=5, spread=True),
    },
    "linear.dense": {
        **_rows(_dense, 0, 1, 2, 33),
        "rows apart": partial(_dense, rows=5, spread=True),
        "one row apart": partial(_dense, rows=1, spread=True),
        "fp32 weight": partial(_dense, rows=5, dtype="float32"),
        "bf16 weight": partial(_dense, rows=5, dtype="bfloat16"),
    },
    "linear.fp8_block": {
        **_rows(_fp8_block, 0, 1, 2, 33),
        "rows apart": partial(_fp8_block, rows=5, spread=True),
        "fp32 scales, one row": partial(_fp8_block, rows=1, scales="fp32"),
        "fp32 scales": partial(_fp8_block, rows=19, scales="fp32"),
    },
    "linear.grouped": {
        **_rows(_grouped, 0, 1, 2, 33),
        "fp32 scales": partial(_grouped, rows=3, scales="fp32"),
        "fp32 weight": partial(_grouped, rows=3, dtype="float32"),
        "bf16 weight": partial(_grouped, rows=3, dtype="bfloat16"),
    },
    "hc.mix": {
        **_rows(_mix, 0, 1, 3, 33, 300),
        "sharp": partial(_mix, rows=5, sharpness=20.0),
        "one sharp row": partial(_mix, rows=1, sharpness=20.0),
    },
    "hc.expand": {
        **_rows(_expand, 0, 1, 7, 300),
        "fp32 y": partial(_expand, rows=5, dtype="float32"),
        "bf16 y": partial(_expand, rows=5, dtype="bfloat16"),
    },
    "hc.head": _rows(_head, 0, 1, 7),
    "attention.compress": {
        "first window": partial(_compress, entries=1, first=0),
        "from the start": partial(_compress, entries=5, first=0),
        "one later": partial(_compress, entries=1, first=3),
        "later": partial(_compress, entries=11, first=2),
        "sharp": partial(_compress, entries=3, first=0, sharpness=100.0),
    },
    "attention.compress_decode": {
        f"{count} entries": partial(_compress_decode, entries=count) for count in (0, 1, 5)
    },
    "attention.index_topk": {
        **_rows(_index_topk, 0, 1, 5, 67, start=0),
        "start": partial(_index_topk, rows=37, start=71),
        "one late row": partial(_index_topk, rows=1, start=150),
        "fewer entries": partial(_index_topk, rows=21, start=40, entries=7),
        "no entries": partial(_index_topk, rows=3, start=30, entries=0),
        "ties": partial(_index_topk, rows=21, start=111, kind="ties"),
        "NaN": partial(_index_topk, rows=21, start=61, kind="nan"),
        "fp32 keys": partial(_index_topk, rows=9, start=71, dtype="float32"),
        "bf16 keys": partial(_index_topk, rows=9, start=71, dtype="bfloat16"),
    },
    "attention.index_topk_decode": {
        **_rows(_index_topk_decode, 0, 1, 3, 8, entries=29),
        "few entries": partial(_index_topk_decode, rows=4, entries=3),
        "no entries": partial(_index_topk_decode, rows=2, entries=0),
        "ties": partial(_index_topk_decode, rows=9, entries=41, kind="ties"),
        "NaN": partial(_index_topk_decode, rows=9, entries=17, kind="nan"),
        "fp32 keys": partial(_index_topk_decode, rows=5, entries=29, dtype="float32"),
        "bf16 keys": partial(_index_topk_decode, rows=5, entries=29, dtype="bfloat16"),
    },
    "attention.sparse_prefill": {
        **_rows(_sparse_prefill, 0, 1, 5, 67, start=0),
        "start": partial(_sparse_prefill, rows=37, start=45),
        "one late row": partial(_sparse_prefill, rows=1, start=99),
        "short halo": partial(_sparse_prefill, rows=9, start=3),
        "many entries": partial(_sparse_prefill, rows=70, start=400),
        "long halo": partial(_sparse_prefill, rows=9, start=50, halo=41),
        "sharp": partial(_sparse_prefill, rows=21, start=20, sharpness=30.0),
        "all entries": partial(_sparse_prefill, rows=37, start=45, select=False),
        "fp32 entries": partial(_sparse_prefill, rows=9, start=50, dtype="float32"),
        "bf16 entries": partial(_sparse_prefill, rows=9, start=50, dtype="bfloat16"),
    },
    "attention.sparse_decode": {
        **_rows(_sparse_decode, 0, 1, 3, 8),
        "full lists": partial(_sparse_decode, rows=5, full=True),
        "one full row": partial(_sparse_decode, rows=1, full=True),
        "no columns": partial(_sparse_decode, rows=3, columns=0),
        "sharp": partial(_sparse_decode, rows=5, sharpness=30.0),
        "fp32 caches": partial(_sparse_decode, rows=5, dtype="float32"),
        "bf16 caches": partial(_sparse_decode, rows=5, dtype="bfloat16"),
    },
    "moe.route_hash": {
        **_rows(_route_hash, 0, 1, 7),
        "bf16 gate": partial(_route_hash, rows=5, dtype="bfloat16"),
    },
    "moe.route_learned": {
        **_rows(_route_learned, 0, 1, 7),
        "bf16 gate": partial(_route_learned, rows=5, dtype="bfloat16"),
    },
    "moe.experts": {
        **_rows(_experts, 0, 1, 2, 5, 67),
        "few experts": partial(_experts, rows=9, same=True),
        "an expert twice": partial(_experts, rows=5, repeated=True),
        "an expert twice, one row": partial(_experts, rows=1, repeated=True),
        "fp32 scales": partial(_experts, rows=5, scales="fp32"),
    },
    "moe.swiglu": _rows(_swiglu, 0, 1, 7),
}


def make(op: str, case: Any, variant: str, device: str = "cpu") -> Call:
    """The inputs of one variant; the same numbers every time."""
    seed = zlib.crc32(f"{op} {case} {variant}".encode())
    return VARIANTS[op][variant](case, Draw(seed, device))
