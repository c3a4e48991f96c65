"""Every recorded machine and every known model: a plan, or a reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from metainfer.arch.families import known_names
from metainfer.arch.shape_of import read_shape
from metainfer.core.errors import UserError
from metainfer.hardware.known import machine_names, machine_of
from metainfer.plan import candidates
from metainfer.plan.layouts import Layouts, layouts_of
from metainfer.plan.ledger_ranks import RankLedgers
from metainfer.plan.search import search
from metainfer.plan.search_text import explained
from metainfer.plan.workload import Workload


def of_whole_groups(gpus: int) -> Iterator[Layouts]:
    """Experts and caches divided over all of a group or not at all: a fifth of the layouts."""
    for layouts in layouts_of(gpus):
        one = layouts.decode
        if {one.expert, one.kv_shards} <= {1, one.group} and layouts.prefill.tensor in (
            1,
            one.group,
        ):
            yield layouts


@pytest.mark.parametrize("model", known_names())
@pytest.mark.parametrize("machine", machine_names())
def test_a_plan_or_a_reason(machine: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "layouts_of", of_whole_groups)
    # Prompts of one chunk of the smallest size: one to try in each layout.
    asked = read_shape(model), machine_of(machine), Workload(2048, 64, 1)
    try:
        result = search(*asked, RankLedgers())
    except UserError as error:
        assert "no layout of" in error.message and error.hint and "too much for" in error.hint
        return
    told = explained(result)
    assert "tok/s" in told and max(map(len, told.splitlines())) <= 100
    assert result.best.ledger.total_bytes <= result.best.ledger.limit_bytes
