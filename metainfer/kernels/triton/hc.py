"""Hyper-connections in Triton.

`hc.mix` is two steps: products of the streams with fn, in slices (bound by reading the streams),
then Sinkhorn's rounds and the collapse, which read the streams again: of few rows from the cache.
(One launch in which both steps follow each other closely through tickets took 279 us for 8,192 rows
on an H200, two launches 182.) The shifted form collapses within the first step and reads the
streams once.

fn is kept as two bf16 parts (the nearest bf16, and the nearest of what is left) where the streams
are bf16: products are then exact, and fn is off by 2^-18 of itself at most. With fp32 streams fn
stays fp32 and is multiplied as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton import hc_mix, hc_rows
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.hc_rows import rows_of, warps_of
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from metainfer.ops.base import Target
from metainfer.ops.hc import HyperCase

FEW_ROWS = 64  # one tile, whose slices are one step each
SLICES = 128  # programs that share the first step of few rows
_FEWEST_SLICES = 16  # of many rows


class Mixes(NamedTuple):
    """fn times its scales as parts that add up to it, [P, M, K] in the format of the streams; base
    [M] and the norm's weight [D], fp32."""

    parts_PMK: torch.Tensor
    base_M: torch.Tensor
    norm_weight_D: torch.Tensor | None = None

    def without_norm(self) -> Mixes:
        return self._replace(norm_weight_D=None)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the first step is cut.

    Attributes:
        rows, channels: of one tile and one step of its product.
        splits: slices of the channels, of `slice` channels each (the last ones may have fewer).
        even: no slice has fewer.
    """

    rows: int
    channels: int
    splits: int
    slice: int
    even: bool
    warps: int
    stages: int


def tiles_of(rows: int, channels: int, step: int, slices: int, streams: int = 1) -> Tiles:
    """Tiles for `rows` rows of `channels` channels each, in about `slices` slices. They are the
    same from one power of two to the next, so that few are ever compiled.

    Args:
        step: channels of one step.
        streams: how many tiles of streams one step holds in shared memory.
    """
    height = min(FEW_ROWS, max(16, next_power_of_2(rows)))
    steps = cdiv(channels, step)
    tiles = next_power_of_2(max(1, cdiv(rows, height)))
    wanted = max(1, min(steps, max(_FEWEST_SLICES, slices // tiles)))
    per_slice = cdiv(steps, wanted)
    splits = cdiv(steps, per_slice)
    even = splits * per_slice * step == channels
    stages = 1 if per_slice == 1 else 4 if streams == 1 else 3
    return Tiles(height, step, splits, per_slice * step, even, 4, stages)


def prepare_mix(
    case: HyperCase,
    fn_MK: torch.Tensor,
    base_M: torch.Tensor,
    scale_3: torch.Tensor,
    norm_weight_D: torch.Tensor | None = None,
) -> Mixes:
    counts = (case.streams, case.streams, case.streams**2)
    scale_M = torch.cat([scale_3[n].expand(count) for n, count in enumerate(counts)])
    return Mixes(_parts(case, fn_MK, scale_M), base_M, norm_weight_D)


def prepare_head(
    case: HyperCase, fn_SK: torch.Tensor, base_S: torch.Tensor, scale_1: torch.Tensor
) -> Mixes:
    return Mixes(_parts(case, fn_SK, scale_1), base_S)


def _parts(case: HyperCase, fn_MK: torch.Tensor, scale_M: torch.Tensor) -> torch.Tensor:
    fn_MK = fn_MK * scale_M.unsqueeze(1)
    if case.stream_dtype == "float32":
        return fn_MK.unsqueeze(0).contiguous()
    near_MK = fn_MK.bfloat16()
    return torch.stack([near_MK, (fn_MK - near_MK.float()).bfloat16()])


def mix(
    launch: Launcher,
    case: HyperCase,
    weights: Mixes,
    streams_TSD: torch.Tensor,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hc.mix`, and `hc.mix_norm` where the weights hold a norm's; `tiles` for experiments."""
    u_TD, post_TS, comb_TSS = results_of(case, streams_TSD)
    _collapse(launch, case, weights, streams_TSD, u_TD, post_TS, comb_TSS, tiles)
    return u_TD, post_TS, comb_TSS


def head(
    launch: Launcher, case: HyperCase, weights: Mixes, streams_TSD: torch.Tensor
) -> torch.Tensor:
    u_TD = streams_TSD.new_empty(len(streams_TSD), case.width, dtype=TORCH_DTYPES[case.dtype])
    _collapse(launch, case, weights, streams_TSD, u_TD, None, None)
    return u_TD


def results_of(
    case: HyperCase, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for u_TD, post_TS and comb_TSS."""
    rows, streams = len(streams_TSD), case.streams
    return (
        streams_TSD.new_empty(rows, case.width, dtype=TORCH_DTYPES[case.dtype]),
        streams_TSD.new_empty(rows, streams, dtype=torch.float32),
        streams_TSD.new_empty(rows, streams, streams, dtype=torch.float32),
    )


def step_of(case: HyperCase, most: int) -> int:
    """Channels of one step of the product: so many bytes of a row."""
    return most // 2 if case.stream_dtype == "float32" else most


def columns_of(mixes: int, squares: int) -> int:
    """Columns of partials."""
    return max(16, next_power_of_2(mixes + squares))


def _collapse(
    launch: Launcher,
    case: HyperCase,
    weights: Mixes,
    streams_TSD: torch.Tensor,
    u_TD: torch.Tensor,
    post_TS: torch.Tensor | None,
    comb_TSS: torch.Tensor | None,
    tiles: Tiles | None = None,
) -> None:
    """u_TD, and post_TS and comb_TSS where they are wanted."""
    rows = len(streams_TSD)
    partials_TPN = partials(launch, case, weights, streams_TSD, tiles)
    iterations = case.iterations if post_TS is not None else 0
    launch(
        hc_mix.mix_finish,
        (_finishing(case, rows, iterations > 0, True),),
        streams_TSD,
        partials_TPN,
        weights.base_M,
        weights.norm_weight_D,
        u_TD,
        post_TS,
        comb_TSS,
        rows,
        case.norm_eps,
        case.eps,
        num_warps=warps_of(case),
        ITERATIONS=iterations,
        R=_mixed_rows(rows),
        RC=rows_of(case),
        S=case.streams,
        D=case.width,
        BD=next_power_of_2(case.width),
        M=len(weights.base_M),
        SPLITS=partials_TPN.shape[1],
        BP=next_power_of_2(partials_TPN.shape[1]),
        BN=partials_TPN.shape[2],
        NORM=weights.norm_weight_D is not None,
    )


def partials(
    launch: Launcher,
    case: HyperCase,
    weights: Mixes,
    streams_TSD: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """The first step: fp32 [T, slices, columns], as `hc_mix` says."""
    rows, channels, mixes = len(streams_TSD), case.streams * case.width, len(weights.base_M)
    step = step_of(case, 128 if rows <= FEW_ROWS else 64)
    tiles = tiles or tiles_of(rows, channels, step, SLICES)
    columns = columns_of(mixes, 1)
    partials_TPN = streams_TSD.new_empty(rows, tiles.splits, columns, dtype=torch.float32)
    launch(
        hc_mix.mix_partials,
        (cdiv(rows, tiles.rows), tiles.splits),
        streams_TSD,
        weights.parts_PMK,
        partials_TPN,
        rows,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        K=channels,
        M=mixes,
        SPLITS=tiles.splits,
        KS=tiles.slice,
        EVEN=tiles.even,
        BM=tiles.rows,
        BN=columns,
        BK=tiles.channels,
        PARTS=len(weights.parts_PMK),
        UPCAST=launch.interpreted,
    )
    return partials_TPN


def _mixed_rows(rows: int) -> int:
    """Rows whose rounds one program does."""
    return 1 if rows <= FEW_ROWS else 16


def _finishing(case: HyperCase, rows: int, mixes: bool, collapses: bool) -> int:
    """Programs of the second step."""
    mixing = cdiv(rows, _mixed_rows(rows)) if mixes else 0
    return mixing + (cdiv(rows, rows_of(case)) if collapses else 0)


def mix_shifted(
    launch: Launcher,
    case: HyperCase,
    weights: Mixes,
    streams_TSD: torch.Tensor,
    given_TS: torch.Tensor,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`tiles` for experiments."""
    rows, mixes = len(streams_TSD), case.mixes
    u_TD, post_TS, comb_TSS = results_of(case, streams_TSD)
    pre_TS = torch.empty_like(post_TS)
    tiles = tiles or tiles_of(rows, case.width, step_of(case, 32), SLICES, case.streams)
    columns = columns_of(mixes, 2)
    partials_TPN = streams_TSD.new_empty(rows, tiles.splits, columns, dtype=torch.float32)
    launch(
        hc_mix.shifted_partials,
        (cdiv(rows, tiles.rows), tiles.splits),
        streams_TSD,
        weights.parts_PMK,
        given_TS.contiguous(),
        partials_TPN,
        u_TD,
        rows,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        S=case.streams,
        D=case.width,
        M=mixes,
        SPLITS=tiles.splits,
        DS=tiles.slice,
        EVEN=tiles.even,
        BM=tiles.rows,
        BN=columns,
        BK=tiles.channels,
        PARTS=len(weights.parts_PMK),
        UPCAST=launch.interpreted,
    )
    launch(
        hc_mix.shifted_finish,
        (_finishing(case, rows, True, case.normed),),
        partials_TPN,
        weights.base_M,
        weights.norm_weight_D,
        u_TD,
        pre_TS,
        post_TS,
        comb_TSS,
        rows,
        case.norm_eps,
        case.eps,
        num_warps=warps_of(case),
        ITERATIONS=case.iterations,
        R=_mixed_rows(rows),
        RC=rows_of(case),
        S=case.streams,
        D=case.width,
        BD=next_power_of_2(case.width),
        M=mixes,
        SPLITS=tiles.splits,
        BP=next_power_of_2(tiles.splits),
        BN=columns,
        NORM=case.normed,
    )
    return u_TD, pre_TS, post_TS, comb_TSS


def whole_streams(case: HyperCase, target: Target) -> Verdict:
    """Serves a power of two of streams."""
    if case.streams & (case.streams - 1):
        return no(f"{case.streams} streams are not a power of two")
    return on_gpu(case, target)


BACKENDS = (
    Declared("hc.mix", mix, whole_streams, prepare_mix),
    Declared("hc.mix_norm", mix, whole_streams, prepare_mix),
    Declared("hc.mix_shifted", mix_shifted, whole_streams, prepare_mix),
    Declared("hc.expand", hc_rows.expand, whole_streams),
    Declared("hc.collapse", hc_rows.collapse, whole_streams, hc_rows.prepare_collapse),
    Declared("hc.head", head, whole_streams, prepare_head),
)
