"""Arguments of calls by name, and caches as plain numbers, for sides with calls of their own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from metainfer.kernels.inputs.base import DTYPES, Call
from metainfer.kernels.reference import BACKENDS
from metainfer.kernels.reference.dequantise import scales_to_float
from metainfer.kernels.reference.formats import decode_e4m3, decode_index, decode_rows
from metainfer.ops.catalogue import OPS

DENSE = "dense"


def named_arguments(op: str, call: Call) -> dict[str, Any]:
    """The arguments by the names that the reference gives them."""
    (run,) = (backend.run for backend in BACKENDS if backend.op == op)
    names = list(inspect.signature(run).parameters)[2 if OPS[op].weights else 1 :]
    return dict(zip(names, call.arguments, strict=False))


def dense_cache(row_format: str, cache: torch.Tensor | None) -> torch.Tensor | None:
    """A cache of latents as numbers."""
    if cache is None or row_format == DENSE:
        return cache
    return torch.cat([decode_rows(row_format, part).bfloat16() for part in cache.split(2**18)])


def dense_index(case: Any, coded: Any) -> torch.Tensor:
    """Index keys or queries as numbers in the case's dtype."""
    if isinstance(coded, torch.Tensor):
        return coded.to(DTYPES[case.dtype])
    codes, scales = coded
    return torch.cat(
        [
            decode_index(case.key_format, *part).to(DTYPES[case.dtype])
            for part in zip(codes.split(2**20), scales.split(2**20), strict=True)
        ]
    )


def decoded_rows(case: Any, codes_TI: torch.Tensor, scales_TG: torch.Tensor) -> torch.Tensor:
    """Rows in fp8 groups as numbers in the case's dtype."""
    factor_TI = scales_to_float(scales_TG).repeat_interleave(case.group, 1)
    numbers_TI = decode_e4m3(codes_TI) * factor_TI[:, : codes_TI.shape[1]]
    return numbers_TI.to(DTYPES[case.dtype])


def prefill_lists(case: Any, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill: all keys in bf16, one below the other, and for each row the keys that it sees, -1
    for none."""
    keys, listed, offset = [], [], 0
    positions_T1 = given["positions_T"].unsqueeze(1)
    if given["latents_ND"] is not None:
        keys.append(given["latents_ND"].to(torch.bfloat16))
        offset = len(keys[0])
        back_W = torch.arange(case.window, device=positions_T1.device)
        window_TW = given["latent_rows_T"].unsqueeze(1) - back_W
        listed.append(window_TW.masked_fill(back_W > positions_T1, -1))
    if given["entries"] is not None:
        entries = dense_cache(case.entry_format, given["entries"])
        assert entries is not None
        keys.append(entries.to(torch.bfloat16))
        table_BE, chosen_TK = given["entry_rows_BE"], given["selected_TK"]
        if chosen_TK is None:
            entry_E = torch.arange(table_BE.shape[1], device=table_BE.device)
            chosen_TK = torch.where(entry_E < (positions_T1 + 1) // case.ratio, entry_E, -1)
        sequence = 0 if given["sequence_T"] is None else given["sequence_T"].unsqueeze(1)
        rows_TK = table_BE[sequence, chosen_TK.clamp(min=0)] + offset
        listed.append(torch.where(chosen_TK < 0, -1, rows_TK))
    return torch.cat(keys), torch.cat(listed, dim=1)
