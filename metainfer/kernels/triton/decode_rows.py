"""What the decode kernels in Gluon share: where a split's keys lie, bytes to bf16, sinks, results.

Bytes go from memory into registers, one tile of keys before they are wanted, and from there as
bf16 into shared memory. A row is taken in pieces of a power of two of blocks; a piece is [N, G, B]:
N keys, G blocks that share a scale, B words of four bytes of a block. (The compiler would keep
each byte of a tensor of bytes in a register of its own.) What comes out are words too, of two
channels in bf16.

Codes are decoded eight or four at a time (`code_words`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from metainfer.kernels.triton.code_words import E2M1_TO_BF16, E4M3_TO_BF16
from metainfer.kernels.triton.gluon_names import copy_async
from metainfer.ops.formats import FORMATS

as_words = getattr(gl.shared_memory_descriptor, "reinterpret", None) or (
    gl.shared_memory_descriptor._reinterpret  # before Triton 3.9
)

LENGTHS = (
    "rows", "heads", "window_columns", "entry_columns", "splits", "window_list_stride",
    "entry_list_stride",
)  # fmt: skip
"""Arguments of the kernels whose values compile nothing anew: lists are as long as contexts."""

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# The compiler copies what constants are made from.
ROWS = dict(FORMATS)


@dataclass(frozen=True)
class Piece:
    """Where a piece of a row lies, in bytes of the row, and where it goes, in words of bf16.

    Attributes:
        blocks, words: G and B.
        layout: of its codes; `keys` that of its keys.
    """

    codes_at: int
    scales_at: int
    goes_to: int
    blocks: int
    words: int
    layout: Any
    keys: Any


@gluon.constexpr_function
def pieces_of(form, warps):
    """The coded channels of a format in pieces, the largest first."""
    row = ROWS[form]
    block_bytes = row.code_bytes // row.blocks
    # Then a thread writes 16 bytes of bf16, beside those of its neighbours.
    each = 2 if row.code == "e4m3" else 1
    pieces, done = [], 0
    while done < row.blocks:
        blocks = 1 << (row.blocks - done).bit_length() - 1
        along = block_bytes // 4 // each
        across = min(blocks, 32 // along)
        threads = [32 // (along * across), across, along]
        layout = gl.BlockedLayout([1, 1, each], threads, [warps, 1, 1], [2, 1, 0])
        pieces.append(
            Piece(
                done * block_bytes,
                row.scales_at + done * row.scale_bytes // row.blocks,
                done * row.block // 2,
                blocks,
                block_bytes // 4,
                layout,
                gl.SliceLayout(1, gl.SliceLayout(2, layout)),
            )
        )
        done += blocks
    return tuple(pieces)


@gluon.constexpr_function
def plain_layout(warps):
    """Of 64 channels in bf16, which are 32 words."""
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def plain_at(form):
    """Where the channels in bf16 begin; -1 where there are none."""
    return ROWS[form].plain_at if ROWS[form].plain else -1


@gluon.constexpr_function
def plain_goes_to(form, width):
    """Word among the values to which the channels in bf16 go; -1 where they are no values."""
    return ROWS[form].coded // 2 if ROWS[form].coded < width else -1


@gluon.constexpr_function
def code_of(form):
    return ROWS[form].code


@gluon.constexpr_function
def scale_of(form):
    return ROWS[form].scale


@gluon.jit
def listed(
    tile, lists, BN: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr, layout: gl.constexpr
):
    """int32 [N]: cache rows of the keys of a tile, -1 where there is none.

    Args:
        lists: the two lists of this row and how long they are, the tile where the second one
            begins, and the first tile that is not this split's.
    """
    near_list, far_list, near_columns, far_columns, near_tiles, stop = lists
    place = tile * BN
    columns = far_columns
    if FAR:
        from_list = far_list
        place -= near_tiles * BN
    if NEAR and FAR:
        is_near = tile < near_tiles
        from_list = gl.where(is_near, near_list, far_list)
        columns = gl.where(is_near, near_columns, far_columns)
        place = gl.where(is_near, tile * BN, place)
    elif NEAR:
        from_list = near_list
        columns = near_columns
    place_N = place + gl.arange(0, BN, layout)
    inside_N = (place_N < columns) & (tile < stop)
    # No cache has 2^31 rows: even of the shortest they would be 600 GB.
    return gl.load(from_list + place_N, mask=inside_N, other=-1).to(gl.int32)


@gluon.jit
def addresses(row_N, tile, caches, near_tiles, NEAR: gl.constexpr, FAR: gl.constexpr):
    """Where the rows of a tile begin in the cache that its list is for.

    Args:
        caches: the cache of each list and the distances of their rows.
    """
    near, far, near_stride, far_stride = caches
    if NEAR and FAR:
        is_near = tile < near_tiles
        cache = gl.where(is_near, near, far)
        stride = gl.where(is_near, near_stride, far_stride)
    elif NEAR:
        cache = near
        stride = near_stride
    else:
        cache = far
        stride = far_stride
    at_N = cache + row_N.to(gl.int64) * stride
    return gl.multiple_of(at_N, 16)


@gluon.jit
def copy_keys(
    tile, rows_s, k_s, x_s, caches, near_tiles, D: gl.constexpr, EXTRA: gl.constexpr,
    NEAR: gl.constexpr, FAR: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start to copy a tile's keys, as a group."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row_N = rows_s.load(gl.SliceLayout(1, layout))
    at_N1 = addresses(row_N, tile, caches, near_tiles, NEAR, FAR)[:, None]
    there_N1 = (row_N >= 0)[:, None]
    d_D = gl.arange(0, D, gl.SliceLayout(0, layout))
    copy_async(k_s, at_N1 + d_D[None, :], mask=there_N1)
    if EXTRA > 0:
        d_X = D + gl.arange(0, EXTRA, gl.SliceLayout(0, layout))
        copy_async(x_s, at_N1 + d_X[None, :], mask=there_N1)
    async_copy.commit_group()


@gluon.jit
def rows_in(rows_s, FORM: gl.constexpr, WARPS: gl.constexpr):
    """Cache rows of a tile's keys in each layout that `fetch` wants."""
    pieces: gl.constexpr = pieces_of(FORM, WARPS)
    rows = ()
    for i in gl.static_range(len(pieces)):
        row_N = rows_s.load(pieces[i].keys)
        rows = rows + (row_N,)  # type: ignore[assignment]  # noqa: RUF005
    if plain_at(FORM) >= 0:
        row_N = rows_s.load(gl.SliceLayout(1, plain_layout(WARPS)))
        rows = rows + (row_N,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def fetch_piece(at_N, there_N, PLACE: gl.constexpr, FORM: gl.constexpr, WARPS: gl.constexpr):
    """(codes int32 [N, G, B], scales [N, G]) of a piece of the rows at the addresses at_N as memory
    has them; 0 where there is no row."""
    pieces: gl.constexpr = pieces_of(FORM, WARPS)
    layout: gl.constexpr = pieces[PLACE].layout
    g_G = gl.arange(0, pieces[PLACE].blocks, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    b_B = gl.arange(0, pieces[PLACE].words, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    there_N1 = there_N[:, None]
    codes_at_N = gl.multiple_of(at_N + pieces[PLACE].codes_at, 16).to(gl.pointer_type(gl.int32))
    codes_at_NG = codes_at_N[:, None] + (g_G * pieces[PLACE].words)[None, :]
    codes_at = codes_at_NG[:, :, None] + b_B[None, None, :]
    codes_NGB = gl.load(codes_at, mask=there_N1[:, :, None], other=0)
    scales_at_N = at_N + pieces[PLACE].scales_at
    if scale_of(FORM) == "fp32":
        scales_at_N = scales_at_N.to(gl.pointer_type(gl.int32))
    scales_NG = gl.load(scales_at_N[:, None] + g_G[None, :], mask=there_N1, other=0)
    return codes_NGB, scales_NG


@gluon.jit
def fetch(
    tile, rows, caches, near_tiles, FORM: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Bytes of a tile's keys in registers: of each piece codes and scales, then words [N, 32] that
    are bf16; 0 where there is no key."""
    pieces: gl.constexpr = pieces_of(FORM, WARPS)
    raw = ()
    for i in gl.static_range(len(pieces)):
        at_N = addresses(rows[i], tile, caches, near_tiles, NEAR, FAR)
        new = fetch_piece(at_N, rows[i] >= 0, i, FORM, WARPS)
        raw = raw + (new,)  # type: ignore[assignment]  # noqa: RUF005
    if plain_at(FORM) >= 0:
        row_N = rows[len(pieces)]
        at_N = addresses(row_N, tile, caches, near_tiles, NEAR, FAR)
        at_N = gl.multiple_of(at_N + plain_at(FORM), 16).to(gl.pointer_type(gl.int32))
        c_C = gl.arange(0, 32, gl.SliceLayout(0, plain_layout(WARPS)))
        words = gl.load(at_N[:, None] + c_C[None, :], mask=(row_N >= 0)[:, None], other=0)
        raw = raw + (words,)  # type: ignore[assignment]  # noqa: RUF005
    return raw


@gluon.jit
def put(raw, k_w, x_w, FORM: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):
    """What was fetched, as bf16, into shared memory, which is seen as words of two channels.

    Args:
        k_w, x_w: for the D channels of values and for those behind them.
    """
    pieces: gl.constexpr = pieces_of(FORM, WARPS)
    for i in gl.static_range(len(pieces)):
        words = decoded(raw[i][0], raw[i][1], scale_of(FORM), code_of(FORM))
        k_w.slice(pieces[i].goes_to, words.shape[1], 1).store(words)
    if plain_at(FORM) >= 0:
        if plain_goes_to(FORM, D) >= 0:
            k_w.slice(plain_goes_to(FORM, D), 32, 1).store(raw[len(pieces)])
        else:
            x_w.store(raw[len(pieces)])


@gluon.jit
def scale_pairs(scales, SCALE: gl.constexpr):
    """int32: each scale in bf16, exactly, twice."""
    if SCALE == "fp32":
        # A power of two, of which the lower half is 0; NaN has a bit in the upper half.
        half = (scales >> 16) & 0xFFFF
    elif SCALE == "e8m0":
        # 0 is 2^-127. 255 becomes infinity, and all codes of its block are 0: their product is NaN.
        half = gl.maximum(scales.to(gl.int32) << 7, 0x0040)
    else:
        # e4m3 of 2^-9 to 448.
        wide = scales.to(gl.int32)
        number = ((wide & 0x7F) << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36
        number = gl.where((wide & 0x7F) == 0x7F, float("nan"), number)
        half = (number.to(gl.int32, bitcast=True) >> 16) & 0xFFFF
    return half | (half << 16)


@gluon.jit
def decoded(codes_NGB, scales_NG, SCALE: gl.constexpr, CODE: gl.constexpr):
    """int32 [N, words] of a piece: two channels in bf16 a word."""
    N: gl.constexpr = codes_NGB.shape[0]
    CODES: gl.constexpr = codes_NGB.shape[1] * codes_NGB.shape[2]
    pair_NG1 = scale_pairs(scales_NG, SCALE)[:, :, None]
    if CODE == "e4m3":
        first, second = gl.inline_asm_elementwise(
            E4M3_TO_BF16, "=&r,=&r,r,r", [codes_NGB, pair_NG1], (gl.int32, gl.int32), True, 1
        )  # fmt: skip
        words_NW = gl.join(first, second).reshape([N, 2 * CODES])
    else:
        first, second, third, fourth = gl.inline_asm_elementwise(
            E2M1_TO_BF16, "=&r,=&r,=&r,=&r,r,r", [codes_NGB, pair_NG1],
            (gl.int32, gl.int32, gl.int32, gl.int32), True, 1,
        )  # fmt: skip
        # Pairs of pairs: the last index counts from 0 to 3.
        even = gl.join(first, third)
        odd = gl.join(second, fourth)
        words_NW = gl.join(even, odd).reshape([N, 4 * CODES])
    return words_NW


@gluon.jit
def sinks_of(sink, h0, heads, split, M: gl.constexpr, SINK: gl.constexpr, layout: gl.constexpr):
    """fp32 [M]: sinks times log2(e) of the heads from h0 on in the first split, else -inf."""
    sink_M = gl.full([M], float("-inf"), gl.float32, layout)
    if SINK:
        h_M = h0 + gl.arange(0, M, layout)
        is_first_M = (h_M < heads) & (split == 0)
        sink_M = gl.load(sink + h_M, mask=is_first_M, other=float("-inf")) * LOG2E
    return sink_M


@gluon.jit
def leave(
    out, lse, at, h0, heads, top_M, mass_MN, sink_M, acc_MD,
    M: gl.constexpr, D: gl.constexpr, LSE: gl.constexpr, s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):  # fmt: skip
    """Write the results of the heads from h0 on, of which head 0 has the place `at`."""
    h_S = h0 + gl.arange(0, M, gl.SliceLayout(1, s_layout))
    # Where nothing is seen, top is -inf and acc 0.
    safe_M = gl.where(top_M == float("-inf"), 0.0, top_M)
    mass_M = gl.sum(mass_MN, 1) + gl.exp2(sink_M - safe_M)
    mass_M = gl.where(mass_M > 0, mass_M, 1.0)
    if LSE:
        gl.store(lse + at + h_S, (top_M + gl.log2(mass_M)) * LN2, mask=h_S < heads)
    acc_MD = acc_MD * gl.convert_layout(1 / mass_M, gl.SliceLayout(1, o_layout))[:, None]
    h_O = h0 + gl.arange(0, M, gl.SliceLayout(1, o_layout))
    d_O = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    to_MD = out + ((at + h_O) * D)[:, None] + d_O[None, :]
    gl.store(to_MD, acc_MD.to(out.dtype.element_ty), mask=(h_O < heads)[:, None])
