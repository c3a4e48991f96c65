"""attention.sparse_prefill by FlashMLA (`pip install sgl-flash-mla`): latents and entries become
one list of keys in bf16, and int32 lists say which of them each row sees.

Its kernel for decoding reads entries of V4 in pages that end with their scales; caches here keep
the scales of a row behind it, so that one is not bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from metainfer.kernels.reference.formats import decode_rows
from metainfer.kernels.registry import YES, Backend, Verdict, no
from metainfer.ops.attention import DENSE, AttentionCase
from metainfer.ops.base import Target
from metainfer.ops.kernel_order import OPEN

PROJECT = "FlashMLA"

_LIST = 128  # lists have a multiple of so many keys
_HEADS = 64  # or a multiple
_WIDTHS = (512, 576)  # of keys
_MOST_LISTED = 2**26  # numbers of the lists that are held at a time

Forward = Callable[..., tuple[torch.Tensor, Any, Any]]


def _forward() -> Forward | str:
    """Its sparse prefill, or why it is not there."""
    try:
        forward: Forward = import_module("flash_mla.flash_mla_interface").flash_mla_sparse_fwd
    except ModuleNotFoundError:
        return f"{PROJECT} is not installed"
    except Exception as error:  # a library that does not load
        return f"{PROJECT} does not load ({type(error).__name__}: {error})"
    return forward


def eligible(case: AttentionCase, target: Target) -> Verdict:
    if target.type != "cuda" or target.capability != (9, 0):
        return no(f"{PROJECT} has sparse prefill of bf16 keys on sm_90")
    if case.heads % _HEADS or case.width != _WIDTHS[0] or case.key_width not in _WIDTHS:
        return no(f"{PROJECT} takes 64 heads, or a multiple, of 512 channels")
    if case.dtype != "bfloat16" or case.lse:
        return no(f"{PROJECT} gives bf16, and a log-sum-exp without the sink")
    forward = _forward()
    return no(forward) if isinstance(forward, str) else YES


def sparse_prefill(case: AttentionCase, *arguments: Any) -> torch.Tensor:
    forward = _forward()
    assert not isinstance(forward, str)
    return attend(forward, case, *arguments)


def attend(
    forward: Forward,
    case: AttentionCase,
    q_THK: torch.Tensor,
    positions_T: torch.Tensor,
    latents_ND: torch.Tensor | None,
    latent_rows_T: torch.Tensor | None,
    sink_H: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
    entry_rows_BE: torch.Tensor | None = None,
    sequence_T: torch.Tensor | None = None,
    selected_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op by `forward`, which refuses to be started for no rows."""
    if not len(q_THK):
        return q_THK.new_empty(0, case.heads, case.width)
    keys = [] if latents_ND is None else [latents_ND.to(torch.bfloat16)]
    first = 0 if latents_ND is None else len(latents_ND)  # entry among all keys
    if entries is None or entry_rows_BE is None or not entry_rows_BE.numel():
        entry_rows_BE, selected_TK = None, None
    else:
        kept = entries.index_select(0, entry_rows_BE.clamp(min=0).flatten())
        numbers = kept if case.entry_format == DENSE else decode_rows(case.entry_format, kept)
        keys.append(numbers.to(torch.bfloat16))
    keys_N1K = torch.cat(keys).unsqueeze(1)
    entries_each = 0 if entry_rows_BE is None else entry_rows_BE.shape[1]
    listed = case.window + (entries_each if selected_TK is None else selected_TK.shape[1])
    results = []
    for rows in _slices(len(q_THK), max(1, _MOST_LISTED // max(1, listed))):
        parts = []
        if latent_rows_T is not None:
            parts.append(_window(case, positions_T[rows], latent_rows_T[rows]))
        if entry_rows_BE is not None:
            own_t = None if sequence_T is None else sequence_T[rows]
            chosen = None if selected_TK is None else selected_TK[rows]
            names_tk = _names(case, positions_T[rows], chosen, entries_each)
            parts.append(_places(names_tk, first, own_t, entries_each))
        lists_tN = torch.cat(parts, dim=1)
        lists_tN = torch.nn.functional.pad(lists_tN, (0, -lists_tN.shape[1] % _LIST), value=-1)
        stops_t = (lists_tN >= 0).int().mul_(_upwards(lists_tN)).amax(1).int()
        out, *_ = forward(
            q_THK[rows].contiguous(), keys_N1K, lists_tN.unsqueeze(1), case.score_scale, case.width,
            sink_H, stops_t, True,
        )  # fmt: skip
        results.append(out)
    return results[0] if len(results) == 1 else torch.cat(results)


def _slices(rows: int, step: int) -> Iterator[slice]:
    yield from (slice(first, first + step) for first in range(0, rows, step))


def _upwards(lists_tN: torch.Tensor) -> torch.Tensor:
    """int32 [N], 1 to N: a row's list ends behind the largest place that holds a key."""
    count = lists_tN.shape[1]
    return torch.arange(1, count + 1, device=lists_tN.device, dtype=torch.int32)


def _window(
    case: AttentionCase, positions_t: torch.Tensor, latent_rows_t: torch.Tensor
) -> torch.Tensor:
    """int32 [t, W], the latents that each row sees."""
    back_W = torch.arange(case.window, device=positions_t.device)
    rows_tW = (latent_rows_t.unsqueeze(1) - back_W).int()
    return rows_tW.masked_fill_(back_W > positions_t.unsqueeze(1), -1)


def _names(
    case: AttentionCase, positions_t: torch.Tensor, chosen: torch.Tensor | None, entries: int
) -> torch.Tensor:
    """int32 [t, K], the numbers of entries that each row sees: the chosen ones, or all."""
    if chosen is not None:
        return chosen.int()
    entry_E = torch.arange(entries, device=positions_t.device, dtype=torch.int32)
    seen_t1 = ((positions_t + 1) // case.ratio).int().unsqueeze(1)
    return torch.where(entry_E < seen_t1, entry_E, -1)


def _places(
    names_tK: torch.Tensor, first: int, sequence_t: torch.Tensor | None, each: int
) -> torch.Tensor:
    """Where these entries lie among all keys; -1 stays."""
    base = first if sequence_t is None else (sequence_t * each + first).int().unsqueeze(1)
    return torch.where(names_tK < 0, -1, names_tK + base)


BACKENDS = (Backend("attention.sparse_prefill", OPEN, sparse_prefill, eligible),)
