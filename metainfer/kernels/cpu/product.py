"""Products of many rows with one matrix, in few different shapes."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, pad

_PIECE_ROWS = 256
_REST_ROWS = 32


def product(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """x times the transposed weight, [T, O], both of one dtype.

    torch compiles code for every shape of a product in bf16 that it meets (0.8 ms and 0.7 MB each)
    and keeps that of the last 1024. So rows are computed in a multiple of 256, and the rest filled
    up to a multiple of 32, instead of in as many numbers as there are lengths of prompts.
    """
    rows = len(x_TI)
    whole = rows - rows % _PIECE_ROWS
    if x_TI.dtype is not torch.bfloat16 or rows == whole:
        return linear(x_TI, weight_OI)
    missing = -rows % _REST_ROWS
    if whole == 0:
        return linear(pad(x_TI, (0, 0, 0, missing)) if missing else x_TI, weight_OI)[:rows]
    y_TO = x_TI.new_empty(rows + missing, len(weight_OI))
    torch.mm(x_TI[:whole], weight_OI.T, out=y_TO[:whole])
    rest_RI = pad(x_TI[whole:], (0, 0, 0, missing)) if missing else x_TI[whole:]
    torch.mm(rest_RI, weight_OI.T, out=y_TO[whole:])
    return y_TO[:rows]
