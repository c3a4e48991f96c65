"""The search over layouts, with a ledger that answers as a test wants."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from metainfer.arch.shape_of import read_shape
from metainfer.core.errors import MetainferError, UserError
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Machine
from metainfer.plan.compare import compare
from metainfer.plan.compare import text as comparison_text
from metainfer.plan.found import INTERACTIVE, OBJECTIVES, THROUGHPUT, TTFT
from metainfer.plan.layouts import Formats, Layout, Layouts, layouts_of
from metainfer.plan.search import Result, search
from metainfer.plan.search_record import record
from metainfer.plan.search_text import WIDTH, explained, summary
from metainfer.plan.workload import Workload, parse_workload


@dataclass(frozen=True)
class Memory:
    fits: bool = True
    reason: str = ""
    total_bytes: int = 40 * 10**9
    limit_bytes: int = 96 * 10**9


ROOM = Memory()
FULL = Memory(False, "weights 161.0 GB + caches 4.2 GB of 96.0 GB", 165 * 10**9)
Judge = Callable[[Layouts, Formats], Memory]


def found(
    machine: str | Machine = "rtx-pro-6000-x4",
    model: str = "deepseek-v4-flash",
    workload: Workload | None = None,
    judge: Judge = lambda layouts, formats: ROOM,
    objective: str = THROUGHPUT,
    profile: str = "metainfer",
) -> Result:
    return search(
        read_shape(model),
        machine_of(machine) if isinstance(machine, str) else machine,
        workload or Workload(),
        lambda shape, machine, layouts, workload, formats: judge(layouts, formats),
        objective,
        profile,
    )


def test_layouts_cover_all_ways_to_divide_gpus() -> None:
    every = list(layouts_of(4))
    assert len(set(every)) == len(every)
    assert {one.gpus for one in every} == {1, 2, 3, 4}
    assert Layouts(Layout(context=4), Layout(tensor=4)) in every
    assert Layout(2, 2, 1, 1).name == "2 x TP2" and Layout().name == "1 GPU"
    pair = Layouts(Layout(2, 1, 2, 1, 2), Layout(2, 2, 1, 1, 2))
    assert pair.name == "2 x CP2 EP2 | TP2"
    with pytest.raises(MetainferError, match="expert = 3 does not divide a group of 4"):
        Layout(tensor=4, expert=3)
    with pytest.raises(MetainferError, match="weights and caches are in one place"):
        Layouts(Layout(tensor=2), Layout(tensor=4))


def test_workloads_from_text() -> None:
    assert parse_workload("input=8K,output=2,concurrency=3,rate=0.5,context=32K") == Workload(
        8192, 2, 3, 0.5, 32768
    )
    assert parse_workload("").longest_context == 8704
    for text, message in (
        ("inputs=3", "'inputs=3' is no part"),
        ("input=x", "input=x is not a number"),
        ("input=1,input=2", "says input twice"),
        ("output=0", "output=0, which is below 1"),
        ("rate=0", "rate=0, not above 0"),
        ("rate=nan", "rate=nan, not above 0"),
        ("rate=1e308", "at most 1e.06"),
        ("concurrency=1000000000", "concurrency=1000000000, which is above 65536"),
        ("context=12", "input and output of a request are 8704"),
    ):
        with pytest.raises(UserError, match=message):
            parse_workload(text)


@pytest.mark.parametrize("tokens", [1, 127])
def test_prompts_below_a_block_are_read_where_ranks_do_not_share_them(tokens: int) -> None:
    result = found(workload=Workload(tokens, 16, 1))
    assert all(one.layouts.prefill.context == 1 for one in result.ranked)
    assert any("less than 128 tokens" in one.reason for one in result.rejected)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_best_is_the_best_by_its_objective(objective: str) -> None:
    ranked = found(objective=objective).ranked
    values = {
        THROUGHPUT: [-one.prediction.requests_per_s for one in ranked],
        TTFT: [one.prediction.ttft_s for one in ranked],
        INTERACTIVE: [one.prediction.tpot_s for one in ranked],
    }[objective]
    assert values == sorted(values)
    assert ranked[0].why == "" and all(one.why for one in ranked[1:])


def test_what_does_not_fit_is_refused_with_the_ledger_s_reason() -> None:
    def judge(layouts: Layouts, formats: Formats) -> Memory:
        return ROOM if layouts.decode.group * layouts.decode.pipeline >= 2 else FULL

    result = found(judge=judge)
    assert all(one.layouts.decode.replicas <= 2 for one in result.ranked)
    reasons = {one.name: one.reason for one in result.rejected}
    assert reasons["4 x 1 GPU"] == FULL.reason
    assert reasons["TP3"] == "64 attention heads / 3 ranks = 21.3"


def test_a_smaller_chunk_is_taken_where_the_best_does_not_fit() -> None:
    def judge(layouts: Layouts, formats: Formats) -> Memory:
        return ROOM if formats.chunk_rows <= 4096 else FULL

    result = found(judge=judge)
    assert {one.formats.chunk_rows for one in result.ranked} <= {2048, 4096}


def test_tables_go_where_there_is_room() -> None:
    def no_host(layouts: Layouts, formats: Formats) -> Memory:
        return FULL if formats.engram == "host" else ROOM

    assert found(model="deepseek-v4.1-flash").best.formats.engram == "host"
    assert found(model="deepseek-v4.1-flash", judge=no_host).best.formats.engram == "gpu"


def test_experts_in_four_bits_where_the_released_model_fits_nowhere() -> None:
    def judge(layouts: Layouts, formats: Formats) -> Memory:
        return ROOM if (formats.experts, formats.linear) == ("fp4", "fp8") else FULL

    result = found(model="glm-5.3", judge=judge)
    assert result.best.formats.experts == "fp4"
    assert "experts in fp4, its other matrices in fp8" in result.notes[0]
    assert not any("converted" in note for note in found(model="glm-5.3").notes)


def test_nothing_fits() -> None:
    with pytest.raises(UserError, match="no layout of 4 GPUs holds deepseek-v4-flash") as error:
        found(judge=lambda layouts, formats: FULL)
    assert FULL.reason in str(error.value.hint)


def test_one_gpu_and_none() -> None:
    result = found("h200-x1")
    assert [one.layouts.name for one in result.ranked] == ["1 GPU"]
    assert "layout" in explained(result)
    machine = machine_of("h200-x1")
    with pytest.raises(UserError, match="this machine has no GPU"):
        found(replace(machine, gpus=()))
    with pytest.raises(UserError, match="no plan without GPUs: the driver's library is") as no:
        found(replace(machine, gpus=Unknown("the driver's library is not there")))
    assert "rtx-pro-6000-x8" in no.value.hint


def test_a_workload_longer_than_the_model_reads() -> None:
    with pytest.raises(UserError, match="deepseek-v3.2 reads 163,840 tokens at most"):
        found(model="deepseek-v3.2", workload=Workload(200_000, 1, 1))


def test_engines_that_do_not_divide_prompts() -> None:
    result = found(profile="stock")
    assert all(one.layouts.prefill.context == 1 for one in result.ranked)
    assert any("does not divide prompts" in one.reason for one in result.rejected)


def test_machines_without_peer_access_are_told_so() -> None:
    result = found("rtx-5070ti-x2", judge=lambda one, _: ROOM if one.decode.tensor == 2 else FULL)
    assert any("through host memory" in note for note in result.notes)
    # Replicas and pipelines, which exchange little, come before ranks that divide heads.
    assert found("rtx-5070ti-x2").best.layouts.decode.group == 1


def test_a_queue_that_grows_is_told() -> None:
    result = found(workload=Workload(request_rate_per_s=50.0))
    assert any("grows without end" in note for note in result.notes)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_overload_is_told_in_place_of_a_time(objective: str) -> None:
    work = Workload(request_rate_per_s=40.0)
    result = found(workload=work, objective=objective)
    told = explained(result)
    assert "TTFT       overload: more requests arrive than are answered; " in told
    assert re.search(r"\binf\b|\bnan\b", told) is None
    text = json.dumps(record(result), allow_nan=False)
    predicted = json.loads(text)["chosen"]["predicted"]
    assert predicted["ttft_s"] is None and predicted["load"] > 1.0
    if objective == TTFT:  # where none has one, what answers most comes first
        rates = [one.prediction.requests_per_s for one in result.ranked]
        assert rates == sorted(rates, reverse=True)
        assert all("fewer requests a second" in one.why for one in result.ranked[1:])


def test_text_fits_and_names_what_was_found() -> None:
    result = found("rtx-pro-6000-x8", judge=lambda one, _: ROOM if one.decode.group > 1 else FULL)
    for text in (explained(result), summary(result)):
        assert max(map(len, text.splitlines())) <= WIDTH
        assert result.best.layouts.prefill.name in text
    page = explained(result)
    assert "Why not the others:" in page and FULL.reason in page and "#####" in page
    assert "CP tokens of prompts" in page  # the names of layouts are explained


def test_two_machines_come_with_what_holds_of_each() -> None:
    pair = tuple((name, machine_of(name)) for name in ("rtx-pro-6000-x4", "rtx-pro-6000-x2"))

    def ledger(shape: object, machine: Machine, *asked: object) -> Memory:
        released = any(isinstance(one, Formats) and one.experts == "released" for one in asked)
        return FULL if machine is pair[1][1] and released else ROOM

    told = compare(read_shape("glm-5.3"), pair, Workload(), ledger, TTFT, "metainfer")
    notes = " ".join(comparison_text(told).split())
    assert "rtx-pro-6000-x2: glm-5.3 as released fits in no layout" in notes
    assert notes.count("compiled for sm_120") == 1  # what holds of both stands once


def test_record_goes_through_json() -> None:
    result = found("rtx-pro-6000-x8")
    written = json.loads(json.dumps(record(result)))
    assert written["chosen"]["name"] == result.best.layouts.name
    times = written["chosen"]["time"]["prompt_token"]
    replicas = written["chosen"]["prefill"]["replicas"]
    told = written["chosen"]["predicted"]["input_tokens_per_s"]
    assert sum(item["seconds"] for item in times) == pytest.approx(replicas / told)
    assert {way["operation"] for way in written["transports"]} >= {"all_reduce", "all_gather"}
    assert written["runners_up"][0]["why_not"]


@pytest.mark.parametrize("name", ["b300-x8", "rtx-4090-x4"])
def test_every_model_on_other_machines(name: str) -> None:
    for model in ("deepseek-v4-flash", "deepseek-v4.1-flash", "deepseek-v3.2", "glm-5.3"):
        best = found(name, model).best.prediction
        assert 0 < best.tpot_s < 2 and 0 < best.ttft_s < 120 and best.input_per_s > 100
