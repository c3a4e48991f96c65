"""Inputs for sampling: logits as models make them, requests that ask for all kinds of things."""

from __future__ import annotations

import math
from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw
from metainfer.ops.base import Load

_PENALTIES = ((1.0, 0.0, 0.0), (1.2, 0.5, 0.25), (0.8, -0.5, 0.0), (1.0, 0.0, 1.5))
# Inverse temperature, top_p, min_p, top_k: a greedy row, then what requests ask for.
_RULES = (
    (1.0, 1.0, 0.0, 0),
    (0.0, 1.0, 0.0, 0),
    (1.25, 0.9, 0.0, 0),
    (0.5, 1.0, 0.0, 40),
    (1.0, 1.0, 0.05, 0),
    (2.0, 0.95, 0.01, 50),
    (0.125, 0.99, 0.0, 0),
)


def logits(case: Any, draw: Draw, rows: int, kind: str = "") -> torch.Tensor:
    """fp32 [rows, V]. Kinds: "ties": few different numbers; "equal": one; "odd": rows with a NaN,
    with an infinity and with nothing but -inf among others."""
    x_RV = draw.normal(rows, case.vocab, scale=3.0)
    if kind == "ties":
        x_RV = x_RV.div_(2.0).round_()
    if kind == "equal":
        x_RV.zero_()
    if kind == "odd":
        for row, poison in enumerate((torch.nan, torch.inf, -torch.inf)[:rows]):
            x_RV[row, case.vocab // 2] = poison
    return x_RV


def adjust(
    case: Any, draw: Draw, rows: int, kind: str = "", lists: int = 9, recent: int = 2
) -> Call:
    """Every row has lists of another length, some none."""
    x_RV = logits(case, draw, rows, kind)
    lengths = [
        (lists if row % 3 == 1 else 0, row % 4, lists * (row % 2), (lists + row) * (row % 5 != 0))
        for row in range(rows)
    ]
    lengths = [tuple(min(n, case.vocab) for n in of_row) for of_row in lengths]
    ends = torch.tensor([n for of_row in lengths for n in of_row], dtype=torch.int64).cumsum(0)
    starts_R5 = torch.zeros(rows, 5, dtype=torch.int64)
    starts_R5[:, 1:] = ends.view(rows, 4)
    starts_R5[1:, 0] = starts_R5[:-1, 4]
    counts = [n for of_row in lengths for n in of_row]
    ids = [draw.spread(1, n, case.vocab)[0] for n in counts]
    numbers = [
        draw.integers(0, 4, n).float() - int(place % 4 == 2) for place, n in enumerate(counts)
    ]
    recent_RP = draw.integers(-1, case.vocab, rows, recent)
    if ids and recent:  # one that is listed too, and one that comes twice
        for row, seen in enumerate(ids[3::4]):
            recent_RP[row, 0] = seen[-1] if len(seen) else -1
    recent_RP[::2] = recent_RP[::2, :1]
    nothing = draw.integers(0, 1, 0)
    factors = [_PENALTIES[row % len(_PENALTIES)] for row in range(rows)]
    factors_R3 = torch.tensor(factors, dtype=torch.float32, device=draw.device).view(rows, 3)
    return Call(
        (),
        (
            x_RV,
            starts_R5.to(draw.device),
            torch.cat(ids) if ids else nothing,
            torch.cat(numbers) if ids else nothing.float(),
            recent_RP,
            factors_R3,
        ),
    )


def draw_tokens(
    case: Any, draw: Draw, rows: int, kind: str = "", rules: str = "all", adjusted: bool = False
) -> Call:
    """Rules: "greedy": no row is random; "plain": all are and none filters; "all": of each kind."""
    x_RV = logits(case, draw, rows, kind)
    given_RV = None
    if adjusted:
        given_RV = x_RV.clone()
        given_RV[:, :: max(2, case.vocab // 7)] = -torch.inf
        given_RV[2:3] = -torch.inf
    if rules == "greedy":
        return Call((), (x_RV, given_RV, None, None, False))
    wanted = [_RULES[0 if rules == "plain" else row % len(_RULES)] for row in range(rows)]
    rules_R3 = torch.tensor(
        [(inverse, share, math.log(least) if least else -math.inf) for inverse, share, least, _ in
         wanted],
        dtype=torch.float32,
    ).view(rows, 3)  # fmt: skip
    numbers_R3 = torch.stack(
        [
            torch.tensor([top_k for *_, top_k in wanted], dtype=torch.int64),
            torch.arange(rows) * 0x9E3779B97F4A7C15 % 2**63 - 2**62,
            torch.arange(rows) * 1_000_003,
        ],
        dim=-1,
    )
    given = (rules_R3.to(draw.device), numbers_R3.to(draw.device))
    return Call((), (x_RV, given_RV, *given, rules == "all"))


def logprobs(case: Any, draw: Draw, rows: int, kind: str = "", top: int = 5) -> Call:
    x_RV = logits(case, draw, rows, kind)
    return Call((), (x_RV, draw.integers(0, case.vocab, rows), min(top, case.vocab)))


def adjust_at_load(case: Any, draw: Draw, load: Load) -> Call:
    return adjust(case, draw, load.rows, lists=500)


def logprobs_at_load(case: Any, draw: Draw, load: Load) -> Call:
    return logprobs(case, draw, load.rows, top=20)
