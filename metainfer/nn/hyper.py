"""Hyper-connections: S residual streams instead of one, mixed around every sublayer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from metainfer.nn.builder import LayerBuilder
from metainfer.nn.rows import RmsNorm, Rows, rounds
from metainfer.ops.hc import HyperCase


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


class HyperConnection:
    """Wraps a sublayer: reads its input off the streams, norms it, writes its output back."""

    def __init__(self, build: LayerBuilder, prefix: str, norm_prefix: str) -> None:
        case = _case(build)
        self._mix = build.weighted("hc.mix", case, *_weights(build, prefix))
        self._expand = build.kernel("hc.expand", case)
        self._norm = RmsNorm(build, norm_prefix, coded=rounds(build, case.width))

    def __call__(
        self,
        streams_TSD: torch.Tensor,
        sublayer: Callable[[Rows], tuple[torch.Tensor, ...]],
        rows_W: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The streams [T, S, D] after `sublayer` (rows of width D -> y_TD, in one or two
        summands). Overwrites the argument.

        Args:
            rows_W: int64, rows of which `sublayer` gives y_WD and the streams are returned; None
                for all.
        """
        u_TD, post_TS, comb_TSS = self._mix(streams_TSD)
        y_TD, *more = sublayer(self._norm(u_TD))
        if rows_W is not None:
            streams_TSD, post_TS, comb_TSS = (
                of_rows.index_select(0, rows_W) for of_rows in (streams_TSD, post_TS, comb_TSS)
            )
        return self._expand(streams_TSD, y_TD, post_TS, comb_TSS, *more)


class HyperHead:
    """streams_TSD -> the one row that the head reads, normed, [T, D] in the compute dtype."""

    def __init__(self, build: LayerBuilder, prefix: str, norm_prefix: str) -> None:
        self._collapse = build.weighted("hc.head", _case(build), *_weights(build, prefix))
        self._norm = RmsNorm(build, norm_prefix)

    def __call__(self, streams_TSD: torch.Tensor) -> torch.Tensor:
        return self._norm(self._collapse(streams_TSD)).plain
