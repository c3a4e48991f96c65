"""Sums over ranks of the rows of a step: which of them may travel in 8 bits."""

from __future__ import annotations

import torch

from metainfer.comm.group import Group
from metainfer.nn.step_index import StepIndex
from metainfer.plan.routes import PREFILL
from metainfer.plan.wires import PLAIN


def sum_rows(group: Group, partial_TD: torch.Tensor, step: StepIndex) -> torch.Tensor:
    """[T, D], which may be `partial_TD`.

    Rows of prompts travel in the group's wire and rows that decode as they are, so that no row
    depends on those beside it, or on how a prompt is cut.
    """
    decoding = 0 if step.decode is None else step.decode.num_rows
    if not step.prefills or (group.wire != PLAIN and decoding == len(partial_TD)):
        return group.all_reduce(partial_TD)
    if group.wire == PLAIN or not decoding:
        return group.all_reduce(partial_TD, PREFILL)
    decoded_TD = group.all_reduce(partial_TD[:decoding])
    return torch.cat([decoded_TD, group.all_reduce(partial_TD[decoding:], PREFILL)])
