"""Angles of the rotary embedding: plain in sliding layers, with YaRN where layers compress."""

from __future__ import annotations

import math

import torch

from metainfer.arch.record import Arch, YarnScaling

TABLE_ROWS = 2**15
"""Positions that are kept as a table: 8 MiB at 64 channels. Beyond, rows are computed."""


class RotaryTable:
    """Cosine and sine of every position.

    The angle is position * frequency in fp32, as the released model computes it.
    """

    def __init__(
        self,
        rope_width: int,
        theta: float,
        yarn: YarnScaling | None,
        max_positions: int,
        device: torch.device,
    ) -> None:
        self._frequency_R = frequencies(rope_width, theta, yarn).to(device)
        rows = min(max_positions, TABLE_ROWS)
        self._table_NR2 = self._compute(torch.arange(rows, device=device))

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The table and the frequencies, as `step.index_decode` takes them."""
        return self._table_NR2, self._frequency_R

    def rows(self, positions_T: torch.Tensor, end: int) -> torch.Tensor:
        """fp32 [T, R / 2, 2] at `positions_T` (int64), all of which are below `end`."""
        if end <= len(self._table_NR2):
            return self._table_NR2.index_select(0, positions_T)
        return self._compute(positions_T)

    def _compute(self, positions_T: torch.Tensor) -> torch.Tensor:
        angle_TR = positions_T.unsqueeze(1).float() * self._frequency_R
        return torch.stack([angle_TR.cos(), angle_TR.sin()], dim=-1)


def sliding_table(arch: Arch, device: torch.device) -> RotaryTable:
    """For layers that see the window alone."""
    return RotaryTable(arch.rope_head_dim, arch.rope_theta, None, arch.max_model_len, device)


def compressing_table(arch: Arch, device: torch.device) -> RotaryTable:
    """For layers with entries: queries, latents and entries alike."""
    theta = arch.compress_rope_theta
    return RotaryTable(arch.rope_head_dim, theta, arch.yarn, arch.max_model_len, device)


def frequencies(rope_width: int, theta: float, yarn: YarnScaling | None) -> torch.Tensor:
    """fp32 [R / 2], radians per position.

    YaRN divides by its factor the frequencies that turn less than `beta_slow` times within the
    original context, keeps those that turn more than `beta_fast` times, and blends in between.
    """
    exponent = torch.arange(0, rope_width, 2, dtype=torch.float32) / rope_width
    plain = 1.0 / theta**exponent
    if yarn is None:
        return plain

    def channel(turns: float) -> float:
        period = yarn.original_max_position / (2 * math.pi * turns)
        return rope_width * math.log(period) / (2 * math.log(theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), rope_width - 1)
    pair = torch.arange(rope_width // 2, dtype=torch.float32)
    ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)
