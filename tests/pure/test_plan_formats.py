"""Formats that a plan chooses between: caches, rows between ranks, drafted tokens."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metainfer.arch.cache_kinds import BLOCK_TOKENS, Scope, cache_kinds
from metainfer.arch.families import known_names
from metainfer.arch.shape_of import read_shape
from metainfer.arch.shapes import ModelShape
from metainfer.bench.stage import parse_setting
from metainfer.cli.main import load_verb
from metainfer.cli.verb import parse
from metainfer.core.errors import UserError
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Machine
from metainfer.ops.cache_formats import CODED_KEYS, cache_formats
from metainfer.plan.caches import cache_dtypes
from metainfer.plan.choices import NO_FLAGS, SELF, Caches, Choices, FormatFlags, choices_of
from metainfer.plan.command_text import command_lines
from metainfer.plan.cost.constants import read_constants
from metainfer.plan.cost.phases import Phases
from metainfer.plan.cost.predict import predict
from metainfer.plan.gains import outlook
from metainfer.plan.kv_by_rank import row_formats, stage_caches
from metainfer.plan.layouts import Formats, Layout, Layouts
from metainfer.plan.ledger_ranks import RankLedgers
from metainfer.plan.proof import CacheProof
from metainfer.plan.search import Result, search
from metainfer.plan.search_record import record
from metainfer.plan.search_text import summary
from metainfer.plan.settings import EngineSettings
from metainfer.plan.speculation import speculated, tokens_a_step
from metainfer.plan.workload import Workload


@pytest.mark.parametrize("model", known_names())
def test_index_keys_have_one_default(model: str) -> None:
    """A plan of layouts counts what the engine keeps beside coded latents."""
    side = read_shape(model).side
    _, keys = cache_dtypes(EngineSettings(kv_cache_dtype="fp8"), "bfloat16")
    said = row_formats(side, Formats(latents="fp8", index_keys=keys.value))
    assert keys.value == CODED_KEYS
    assert row_formats(side, Formats(latents="fp8")).entries == said.entries
    assert side.indexer.key_formats[0] == said.entries.index_keys


def test_plan_and_engine_count_the_same_bytes_of_a_block() -> None:
    shape = read_shape("deepseek-v4-flash")
    assert shape.arch is not None
    kept = cache_formats(shape.arch, "fp8", CODED_KEYS)
    growing = stage_caches(shape, Formats(), 0, range(shape.num_layers)).token_block
    kinds = [kind for kind in cache_kinds(shape.arch) if kind.scope is Scope.TOKENS]
    assert growing == sum(kind.rows_per_block * kept.row_bytes(kind) for kind in kinds)
    assert growing / BLOCK_TOKENS < 21 * (592 + 132) / 4 + 20 * 592 / 128 + 1


V4, V41, GLM = map(read_shape, ("deepseek-v4-flash", "deepseek-v4.1-flash", "glm-5.3"))
PAIR, QUAD = machine_of("rtx-pro-6000-x2"), machine_of("rtx-pro-6000-x4")
BYTES = CacheProof("fp8", "fp4", "it passed", 1024)


def planned(
    shape: ModelShape, machine: Machine, choices: Choices | None = None, **asked: Any
) -> Result:
    return search(shape, machine, Workload(8192, 512, 8), RankLedgers(), choices=choices, **asked)


def kept(
    shape: ModelShape, flags: FormatFlags = NO_FLAGS, *proofs: CacheProof
) -> list[tuple[str, str]]:
    return [(one.latents, one.index_keys) for one in choices_of(shape, SELF, flags, proofs).caches]


def test_fewer_bits_compete_where_they_were_proven_or_asked_for() -> None:
    assert kept(V4) == [("bfloat16", "bfloat16")]
    assert kept(V4, NO_FLAGS, BYTES) == [("bfloat16", "bfloat16"), ("fp8", "fp4")]
    assert kept(V4, FormatFlags(kv_cache_dtype="fp8")) == [("fp8", CODED_KEYS)]
    assert kept(V4, FormatFlags(kv_cache_dtype="fp8"), BYTES) == [("fp8", "fp4")]
    assert kept(V4, FormatFlags(index_cache_dtype="fp4")) == [("bfloat16", "fp4")]
    assert kept(V41) == [("bfloat16", "fp8")]  # it has no plain index keys
    assert choices_of(V4, "stock", NO_FLAGS, [BYTES]).caches == (Caches(),)
    with pytest.raises(UserError, match="index keys of glm-5.3 have no such form"):
        choices_of(GLM, SELF, FormatFlags(index_cache_dtype="fp4"))


def test_a_record_lets_bytes_win_and_nothing_else_does() -> None:
    without = planned(V4, PAIR).best
    assert (without.formats.latents, without.formats.wire) == ("bfloat16", "bf16")
    proven = planned(V4, PAIR, choices_of(V4, SELF, NO_FLAGS, [BYTES])).best
    assert (proven.formats.latents, proven.formats.index_keys) == ("fp8", "fp4")
    assert proven.prediction.requests_per_s > without.prediction.requests_per_s
    assert proven.ledger.total_bytes < without.ledger.total_bytes


def test_rows_between_ranks_are_coded_where_a_flag_says_so() -> None:
    coded = planned(V4, QUAD, choices_of(V4, SELF, FormatFlags(wire_dtype="int8")))
    plain = planned(V4, QUAD)
    between = {one.formats.wire for one in coded.ranked if one.layouts.prefill.group > 1}
    assert (
        between == {"int8"}
        and coded.best.prediction.input_per_s > plain.best.prediction.input_per_s
    )


def test_engines_that_draft_do_where_it_gains() -> None:
    assert choices_of(V4, SELF).drafts == (0,)
    assert choices_of(V4, "stock").drafts == (0, 1, 2, 3)
    assert choices_of(V41, "stock").drafts == (0, 5)  # a block at a time
    ranked = planned(V4, QUAD, profile="stock").ranked
    for one in ranked:
        assert one.layouts.decode.pipeline == 1 or one.formats.draft == 0
    assert ranked[0].formats.draft > 0
    fixed = planned(
        V4, QUAD, choices_of(V4, "stock", FormatFlags(num_speculative_tokens=0)), profile="stock"
    )
    assert fixed.best.prediction.tpot_s > ranked[0].prediction.tpot_s
    asked = planned(V4, QUAD, choices_of(V4, SELF, FormatFlags(num_speculative_tokens=2)))
    assert {one.formats.draft for one in asked.ranked} == {2}
    assert any("no stages" in one.reason for one in asked.rejected)
    assert any("drafting 2 tokens gives 2.3 a step" in note for note in asked.notes)
    for shape, count in ((V4, 9), (V41, 6), (V4, -1), (replace(V4, draft=None), 1)):
        with pytest.raises(UserError) as error:
            choices_of(shape, SELF, FormatFlags(num_speculative_tokens=count))
        assert error.value.hint


def test_drafting_gains_about_what_was_published() -> None:
    """Two RTX PRO 6000, one sequence: 90 and 154 tok/s with two tokens (vllm pull 41834)."""
    workload, layout = Workload(1024, 512, 1), Layout(tensor=2)
    constants = read_constants()
    phases = Phases(V4, PAIR, constants, constants.profile("stock"))
    asked = Layouts(layout, layout), Formats(draft=2), workload
    plain = predict(phases, asked[0], Formats(), workload)
    drafting = speculated(phases, *asked, plain)
    assert plain.tpot_s / drafting.tpot_s == pytest.approx(154 / 90, rel=0.15)
    assert drafting.input_per_s == plain.input_per_s  # its window is in the ring already
    assert drafting.decode_error > plain.decode_error
    assert tokens_a_step(0) == 1.0 and tokens_a_step(2) == pytest.approx(1 + 0.75 + 0.75**2)
    mla = Phases(GLM, PAIR, constants, constants.profile("stock"))
    whole = predict(mla, asked[0], Formats(), workload)
    assert speculated(mla, *asked, whole).input_per_s < whole.input_per_s


def test_what_was_not_chosen_says_what_it_gives_and_what_proves_it(tmp_path: Path) -> None:
    ledgers, workload = RankLedgers(), Workload(65536, 512, 8)
    result = search(V4, machine_of("l40s-x4"), workload, ledgers)
    ahead = outlook(result, ledgers, NO_FLAGS, "/data/model")
    by_flag = {gain.flag: gain for gain in ahead.gains}
    coded = by_flag["--kv-cache-dtype fp8 --index-cache-dtype fp4"]
    assert coded.longest_context > ahead.longest_context
    assert coded.command and coded.result is not None
    # The command is one that the verb takes, and what it passes would be a proof.
    words = shlex.split(coded.proof)
    assert words[:4] == ["metainfer", "bench", "quality", "/data/model"]
    load, *_ = parse(load_verb("bench quality"), words[3:], {})
    base = EngineSettings()
    assert V4.arch is not None
    a, b = (parse_setting(text, base, V4.arch).engine for text in (load.a, load.b))
    assert (a.kv_cache_dtype, b.kv_cache_dtype, b.index_cache_dtype) == ("bfloat16", "fp8", "fp4")
    assert load.window_tokens > 4 * V4.arch.index_topk
    text = summary(result, ahead)
    assert max(map(len, text.splitlines())) <= 100 and "--b tuned,--kv-cache-dtype=fp8" in text
    written = json.loads(json.dumps(record(result, ahead)))
    assert written["longest_context_tokens"] == ahead.longest_context
    assert {one["flag"] for one in written["not_chosen"]} == set(by_flag)
    fixed = FormatFlags(kv_cache_dtype="bfloat16")
    assert not [one for one in outlook(result, ledgers, fixed, "m").gains if one.command]


def test_models_that_are_not_served_have_no_proof_yet() -> None:
    ledgers = RankLedgers()
    result = search(V41, QUAD, Workload(), ledgers)
    ahead = outlook(result, ledgers, NO_FLAGS, "m")
    caches = [gain for gain in ahead.gains if gain.flag.startswith("--kv-cache-dtype")]
    assert caches and not any(gain.command for gain in caches)
    assert all("not served by this version" in gain.proof for gain in caches)
    assert "--kv-cache-dtype released --index-cache-dtype fp4" in {gain.flag for gain in caches}


@pytest.mark.parametrize("width", [40, 100])
def test_commands_over_lines_are_the_same_command(width: int) -> None:
    command = "A=1 vllm serve m --flag 'a b' --json '{\"x\": 1}' --last=3 -tp 4 --many one two"
    lines = command_lines(command, width)
    assert max(map(len, lines)) <= width
    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == shlex.split(command)
