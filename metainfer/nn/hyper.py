"""Hyper-connections: S residual streams instead of one, mixed around every sublayer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from metainfer.nn.builder import LayerBuilder
from metainfer.nn.rows import RmsNorm, Rows, rounds
from metainfer.ops.hc import ExpandMixFp8Case, HyperCase


def _case(build: LayerBuilder) -> HyperCase:
    arch = build.arch
    return HyperCase(
        arch.hc_mult,
        arch.hidden_size,
        arch.hc_sinkhorn_iters,
        arch.hc_eps,
        arch.rms_norm_eps,
        build.stream_dtype,
        build.dtype,
    )


def _weights(build: LayerBuilder, prefix: str) -> tuple[torch.Tensor, ...]:
    names = (f"{prefix}_fn", f"{prefix}_base", f"{prefix}_scale")
    return tuple(build.checkpoint.tensor(name, torch.float32) for name in names)


class Streams:
    """Residual streams [T, S, D] between sublayers, and what the last one gave, where it is not
    written into them yet."""

    def __init__(self, streams_TSD: torch.Tensor, *unwritten: torch.Tensor) -> None:
        """`unwritten`: as `hc.expand` takes it behind the streams."""
        self._parts = (streams_TSD, *unwritten)

    def take(self) -> tuple[torch.Tensor, ...]:
        """The streams and what is not written. This object holds nothing afterwards, so that memory
        is free as soon as it is read."""
        parts, self._parts = self._parts, ()
        return parts


class HyperConnection:
    """Wraps a sublayer: reads its input off the streams, norms it, writes its output back.

    Where rows are rounded to codes, the output is written when the next sublayer reads: one
    operation does both.
    """

    def __init__(self, build: LayerBuilder, prefix: str, norm_prefix: str) -> None:
        case, weights = _case(build), _weights(build, prefix)
        self._joined = None
        if rounds(build, case.width):
            assert build.rounding is not None
            norm_weight_D = build.checkpoint.tensor(f"{norm_prefix}.weight", torch.float32)
            joined = ExpandMixFp8Case(case, *build.rounding)
            weights = *weights, norm_weight_D
            self._joined = build.weighted("hc.expand_mix_fp8", joined, *weights)
            return
        self._mix = build.weighted("hc.mix", case, *weights)
        self._expand = build.kernel("hc.expand", case)
        self._norm = RmsNorm(build, norm_prefix)

    def __call__(
        self,
        streams: Streams,
        sublayer: Callable[[Rows], tuple[torch.Tensor, ...]],
        rows_W: torch.Tensor | None = None,
    ) -> Streams:
        """The streams after `sublayer` (rows of width D -> y_TD, in one or two summands). Takes the
        argument's.

        Args:
            rows_W: int64, rows of which `sublayer` gives y_WD and the streams are returned; None
                for all.
        """
        if self._joined is not None:
            x, *mixed = self._read(self._joined, streams)
        else:
            (streams_TSD,) = streams.take()
            u_TD, *mixes = self._mix(streams_TSD)
            x, mixed = self._norm(u_TD), [streams_TSD, *mixes]
        y_TD, *more = sublayer(x)
        if rows_W is not None:
            mixed = [of_rows.index_select(0, rows_W) for of_rows in mixed]
        streams_TSD, post_TS, comb_TSS = mixed
        if self._joined is None:
            return Streams(self._expand(streams_TSD, y_TD, post_TS, comb_TSS, *more))
        return Streams(streams_TSD, y_TD, post_TS, comb_TSS, *more)

    def _read(
        self, joined: Callable[..., tuple[torch.Tensor, ...]], streams: Streams
    ) -> tuple[Any, ...]:
        """Rows, streams with all written, post_TS and comb_TSS."""
        streams_TSD, *unwritten = streams.take()
        codes_TD, scales_TG, x_TD, *mixed = joined(streams_TSD, *(unwritten or _NOTHING))
        return Rows(x_TD, codes_TD, scales_TG), *mixed


_NOTHING = (None, None, None)  # y, post and comb before the first sublayer


class WrittenStreams:
    """Streams -> streams_TSD with all written, behind the last sublayer."""

    def __init__(self, build: LayerBuilder) -> None:
        case = _case(build)
        self._expand = build.kernel("hc.expand", case) if rounds(build, case.width) else None

    def __call__(self, streams: Streams) -> torch.Tensor:
        streams_TSD, *unwritten = streams.take()
        if not unwritten:
            return streams_TSD
        assert self._expand is not None
        written_TSD: torch.Tensor = self._expand(streams_TSD, *unwritten)
        return written_TSD


class HyperHead:
    """streams_TSD -> the one row that the head reads, normed, [T, D] in the compute dtype."""

    def __init__(self, build: LayerBuilder, prefix: str, norm_prefix: str) -> None:
        self._collapse = build.weighted("hc.head", _case(build), *_weights(build, prefix))
        self._norm = RmsNorm(build, norm_prefix)

    def __call__(self, streams_TSD: torch.Tensor) -> torch.Tensor:
        return self._norm(self._collapse(streams_TSD)).plain
