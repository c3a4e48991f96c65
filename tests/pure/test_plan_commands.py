"""Plans of two machines side by side, commands of other engines read and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.arch.shape_of import read_shape
from metainfer.cli.main import load_verb
from metainfer.core.config import flags_of
from metainfer.core.errors import UserError
from metainfer.hardware.known import machine_of
from metainfer.plan.advice import Advice, advise
from metainfer.plan.emit import emit
from metainfer.plan.engine_commands import (
    ABSENT,
    KEPT,
    MAPPED,
    NO_EFFECT,
    SGLANG,
    UNKNOWN,
    VERDICTS,
    VLLM,
    SetUp,
    flags_of_engine,
    known_model,
    read_command,
)
from metainfer.plan.layouts import Layout, Layouts
from metainfer.plan.ledger_ranks import RankLedgers
from metainfer.plan.search import Result, search
from metainfer.plan.workload import Workload
from tests.fakes.command import metainfer

SGLANG_COMMAND = "python -m sglang.launch_server --model-path deepseek-v4-flash"
SCRIPT = """#!/bin/bash
# a server
export NCCL_P2P_DISABLE=1
export MY_OWN=3
vllm serve deepseek-ai/DeepSeek-V4-Flash -tp 4 --enable_expert_parallel \\
  --max-model-len=128K --max-num-seqs 16 --speculative-config '{"method": "mtp"}' \\
  --served-model-name one two --block-size 256 --frobnicate 3 --trust-remote-code
"""


def verdicts(set_up: SetUp) -> dict[str, str]:
    return {said.written.split()[0].split("=")[0]: said.verdict for said in set_up.said}


def test_every_flag_and_variable_of_a_command_is_told(tmp_path: Path) -> None:
    path = tmp_path / "start.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    read = read_command(str(path))
    assert read == read_command(SCRIPT)
    assert (read.engine, read.layout) == (VLLM, Layout(tensor=4, expert=4))
    assert (read.context_tokens, read.requests, read.chunk_rows) == (131072, 16, None)
    assert read.no_peers and read.drafts is None and not read.eager and not read.tuned
    assert known_model(read.model) == "deepseek-v4-flash"
    assert verdicts(read) == {
        "NCCL_P2P_DISABLE": MAPPED, "MY_OWN": UNKNOWN, "deepseek-ai/DeepSeek-V4-Flash": KEPT,
        "-tp": KEPT, "--enable-expert-parallel": MAPPED, "--max-model-len": KEPT,
        "--max-num-seqs": KEPT, "--speculative-config": ABSENT, "--served-model-name": KEPT,
        "--block-size": NO_EFFECT, "--frobnicate": UNKNOWN, "--trust-remote-code": NO_EFFECT,
    }  # fmt: skip


def test_a_command_of_sglang() -> None:
    read = read_command(
        "CUDA_VISIBLE_DEVICES=0,1,2,3 NCCL_MIN_NCHANNELS=16 python3 -m sglang.launch_server"
        " --model-path /data/DeepSeek-V4.1-Flash --tp 2 --dp 2 --ep-size 2"
        " --chunked-prefill-size 2048 --enable-dp-attention --disable-cuda-graph"
    )
    assert (read.engine, read.layout) == (SGLANG, Layout(tensor=2, expert=2))
    assert (read.rows, read.visible, read.tuned, read.eager) == (2048, "0,1,2,3", True, True)
    assert known_model(read.model) == "deepseek-v4.1-flash"
    assert verdicts(read)["--enable-dp-attention"] == MAPPED and read.context == 2
    assert known_model("/data/GLM-5.3-NVFP4") == "glm-5.3"
    assert read_command("vllm serve x/GLM-5.3-NVFP4").experts == "nvfp4"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("llama-server -m x", "neither vLLM nor SGLang"),
        ("vllm serve m --tensor-parallel-size four", "'four' where a number must be"),
        ("vllm serve m -tp 0", "gives 0 where at least 1"),
        ("vllm serve m -tp 4 -dcp 3", "3 shards of caches do not divide 4 ranks"),
        ("vllm serve m -tp", "gives -tp no value"),
        ("vllm serve m --max-model-len --enforce-eager", "gives --max-model-len no value"),
        ("vllm serve 'm", "does not read as a shell's"),
    ],
)
def test_commands_that_are_none(command: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        read_command(command)
    assert error.value.hint


def test_a_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    """Nothing of a command is cut off silently."""
    path = tmp_path / "start.sh"
    path.write_text("#" * 999_900 + "\nvllm serve m -tp 4\n", encoding="utf-8-sig")
    assert read_command(str(path)).layout.tensor == 4
    path.write_text("vllm serve m -tp 4 " + " " * 10**6 + "-dp 2")
    with pytest.raises(UserError, match=r"start\.sh has more than 1 MB") as error:
        read_command(str(path))
    assert error.value.hint
    with pytest.raises(UserError, match="/proc/self/mem cannot be read"):
        read_command("/proc/self/mem")


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_what_flags_are_mapped_to_is_there(engine: str) -> None:
    ours = {
        name
        for _, record in load_verb("serve").records
        for bound in flags_of(record)
        for name in (bound.flag.name, *bound.flag.aliases)
    }
    names: list[str] = []
    for flag in flags_of_engine(engine):
        names += flag.names
        assert flag.verdict in VERDICTS and flag.takes in ("value", "many", "switch")
        if flag.to.startswith("--"):
            assert flag.to.replace("--no-", "--") in ours, flag.to
        if flag.verdict in (ABSENT, NO_EFFECT):
            assert flag.why
        if flag.verdict == KEPT:
            assert flag.to in flag.names
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def planned() -> Result:
    return search(
        read_shape("deepseek-v4-flash"),
        machine_of("rtx-pro-6000-x8"),
        Workload(8192, 512, 16),
        RankLedgers(),
        profile="stock",
    )


def with_layout(result: Result, layout: Layout, prefill: Layout | None = None) -> Result:
    best = replace(result.best, layouts=Layouts(prefill or layout, layout))
    return replace(result, ranked=(best, *result.ranked[1:]))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=8),
        Layout(tensor=8, expert=8),
        Layout(tensor=2, pipeline=4),
        Layout(pipeline=4),
        Layout(tensor=4, expert=4, kv_shards=2),
    ],
)
@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_what_is_written_is_read_again(planned: Result, layout: Layout, engine: str) -> None:
    asked = with_layout(planned, layout)
    emitted = emit(asked, engine, "deepseek-v4-flash")
    assert len(emitted.commands) == 1
    read = read_command(emitted.commands[0])
    lost = engine == SGLANG and layout.kv_shards > 1
    assert read.layout == (replace(layout, kv_shards=1) if lost else layout)
    assert any("caches of decoding" in sentence for sentence in emitted.lost) == lost
    assert read.rows == asked.best.formats.chunk_rows
    assert (read.requests, read.context_tokens) == (16, 8704)
    assert read.drafts == asked.best.formats.draft > 0
    unlike = [said.written.split()[0] for said in read.said if said.verdict not in (KEPT, MAPPED)]
    assert all(name.startswith("--speculative-") for name in unlike)


def test_replicas_are_servers_of_vllm_and_a_flag_of_sglang(planned: Result) -> None:
    asked = with_layout(planned, Layout(replicas=4, tensor=2))
    vllm = emit(asked, VLLM, "m").commands
    reads = [read_command(command) for command in vllm]
    assert [read.layout for read in reads] == [Layout(tensor=2)] * 4
    assert {read.visible for read in reads} == {"0,1", "2,3", "4,5", "6,7"}
    assert len(set(vllm)) == 4
    assert [read.requests for read in reads] == [4] * 4
    assert read_command(emit(asked, SGLANG, "m").commands[0]).layout == asked.best.layouts.decode


def test_what_an_engine_cannot_say_is_told(planned: Result) -> None:
    asked = with_layout(planned, Layout(tensor=8, expert=2), Layout(context=8, expert=2))
    said = emit(asked, VLLM, "m").lost
    assert any("CP8" in sentence for sentence in said)
    assert any("experts in 2 parts" in sentence for sentence in said)
    ours = emit(asked, "metainfer", "m")
    assert "--prefill-context-parallel-size 8 " in ours.commands[0]
    assert ours.commands[0].startswith("metainfer serve m --tensor-parallel-size 8 ")
    alone = emit(with_layout(planned, Layout(replicas=8)), "metainfer", "m")
    assert len(alone.commands) == 8
    drafted = planned.best.formats.draft
    assert alone.lost == (f"drafting {drafted} tokens, which this version does not do",)


def test_advice_says_what_would_do_better() -> None:
    ran = metainfer("plan", "--machine", "rtx-pro-6000-x4", "--from", SCRIPT)
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= 100
    for part in ("unknown:", "--frobnicate 3", "as it is", "better", "metainfer  ", "drafts"):
        assert part in ran.out
    asked = ("plan", "--machine", "rtx-pro-6000-x4", "--json", "--from")
    told = json.loads(metainfer(*asked, SCRIPT).out)
    freed = json.loads(metainfer(*asked, SCRIPT.replace("DISABLE=1", "DISABLE=0")).out)
    assert freed["now"]["input_tokens_per_s"] > 2 * told["now"]["input_tokens_per_s"]
    assert told["better"][0]["gain"] > freed["better"][0]["gain"] >= 0
    # Odd numbers of ranks divide nothing of this model.
    odd = json.loads(metainfer(*asked, "vllm serve deepseek-v4-flash -tp 3").out)
    assert odd["now"] is None and "64 attention heads / 3 ranks" in odd["problem"]
    many = metainfer(*asked, "vllm serve deepseek-v4-flash -tp 8")
    assert many.code == 2 and "needs 8 GPUs (TP8) and has 4" in many.err
    other = metainfer(*asked, "vllm serve somebody/else")
    assert other.code == 2 and "give MODEL beside --from" in other.err


def test_the_better_layout_comes_with_its_command() -> None:
    """It reads again as the layout that was found better, for as many requests as before."""
    command = "vllm serve org/DeepSeek-V4-Flash -tp 4 --max-num-seqs 32 --seed 3 --api-key hush"
    asked = ("plan", "--machine", "rtx-pro-6000-x4", "--from", command)
    told = json.loads(metainfer(*asked, "--json").out)
    better, start = told["better"][0], told["start"]
    reads = [read_command(one) for one in start["commands"]]
    assert replace(reads[0].layout, replicas=len(reads)).name == better["layout"]
    assert {read.drafts for read in reads} == {better["draft"]}
    assert sum(read.requests or 0 for read in reads) == 32
    assert {read.model for read in reads} == {"org/DeepSeek-V4-Flash"}
    page = metainfer(*asked).out
    assert "Start the better one of vllm with:" in page and "hush" not in page
    assert "--seed, --api-key" in page  # they go on as they are


def test_a_set_up_that_is_best_gets_no_other_command() -> None:
    asked = ("plan", "--machine", "rtx-pro-6000-x2", "--json", "--from")
    told = json.loads(metainfer(*asked, "vllm serve deepseek-v4-flash -tp 2").out)
    told = json.loads(metainfer(*asked, told["start"]["commands"][0]).out)
    assert told["start"] is None and abs(told["better"][0]["gain"]) < 0.03


def test_what_is_drafted_is_predicted() -> None:
    asked = ("plan", "--machine", "rtx-pro-6000-x4", "--json", "--from")
    plain = "python -m sglang.launch_server --model-path deepseek-v4-flash --tp 4"
    drafting = f"{plain} --speculative-algorithm EAGLE --speculative-num-steps 3"
    one, other = (json.loads(metainfer(*asked, command).out) for command in (plain, drafting))
    assert other["now"]["tpot_s"] < one["now"]["tpot_s"]
    assert any("drafts 3 tokens a step" in note for note in other["notes"])
    told = '{"method": "mtp", "num_speculative_tokens": 2}'
    assert read_command(f"vllm serve m --speculative-config '{told}'").drafts == 2
    assert read_command("vllm serve m --speculative-config nonsense").drafts is None
    assert read_command("vllm serve m").drafts == 0


def advised(command: str, machine: str = "rtx-pro-6000-x8") -> Advice:
    set_up = read_command(command)
    shape = read_shape(known_model(set_up.model))
    return advise(set_up, shape, machine_of(machine), Workload(), RankLedgers(), "throughput")


def test_the_format_of_caches_is_predicted() -> None:
    command = "vllm serve glm-5.3-NVFP4 -tp 8 --max-model-len 131072"
    own, coded, plain, odd = (
        advised(f"{command}{more}")
        for more in ("", " --kv-cache-dtype fp8", " --kv-cache-dtype bfloat16",
                     " --kv-cache-dtype turbo3")
    )  # fmt: skip
    taken = [one.fits.total_bytes for one in (own, coded, plain, odd) if one.fits is not None]
    assert taken[0] == taken[1] == taken[3] < taken[2]
    steps = [one.now.tpot_s for one in (own, coded, plain, odd) if one.now is not None]
    assert steps[0] == steps[1] == steps[3] < steps[2]
    assert any("caches is not known here" in note for note in odd.notes)
    assert not any("caches is not known here" in note for note in plain.notes)


@pytest.mark.parametrize(
    ("command", "name", "gpus"),
    [
        ("vllm serve m -tp 2 -pcp 4", "TP2 CP4 | TP8", 8),
        ("vllm serve m -tp 4 -pcp 1", "TP4", 4),
        (f"{SGLANG_COMMAND} --tp 8 --attn-cp-size 4 --enable-prefill-cp", "TP2 CP4 | TP8", 8),
        (f"{SGLANG_COMMAND} --tp 4 --enable-nsa-prefill-context-parallel", "CP4 | TP4", 4),
        (f"{SGLANG_COMMAND} --tp 8 --dp 8 --enable-dp-attention", "CP8 | TP8", 8),
        (f"{SGLANG_COMMAND} --tp 8 --dp 2 --enable-dp-attention --attn-cp-size 4", "CP8 | TP8", 8),
        (f"{SGLANG_COMMAND} --tp 2 --dp 2", "2 x TP2", 4),
    ],
)
def test_prompts_divided_by_tokens_are_read(command: str, name: str, gpus: int) -> None:
    layouts = read_command(command).layouts
    assert (layouts.name, layouts.gpus) == (name, gpus)


def test_prompts_divided_by_tokens_are_predicted() -> None:
    heads = advised(f"{SGLANG_COMMAND} --tp 4")
    tokens = advised(f"{SGLANG_COMMAND} --tp 4 --attn-cp-size 4")
    assert heads.now is not None and tokens.now is not None
    assert tokens.now.input_per_s > 1.2 * heads.now.input_per_s
    assert tokens.now.tpot_s == heads.now.tpot_s
    assert any("repeats attention" in note for note in tokens.notes)
    assert heads.fits is not None and tokens.fits is not None
    assert tokens.fits.total_bytes > heads.fits.total_bytes  # whole attention weights
    with pytest.raises(UserError, match="3 parts of a prompt do not divide 4 ranks"):
        read_command(f"{SGLANG_COMMAND} --tp 4 --attn-cp-size 3")


def test_decoding_without_graphs_is_predicted_slower() -> None:
    asked = ("plan", "--machine", "rtx-pro-6000-x4", "--json", "--from")
    plain = "vllm serve deepseek-v4-flash -tp 4"
    one, other = (
        json.loads(metainfer(*asked, command).out)
        for command in (plain, f"{plain} --enforce-eager")
    )
    assert other["now"]["tpot_s"] > one["now"]["tpot_s"] + 5e-3
    assert any("decodes without graphs" in note for note in other["notes"])


def test_flags_that_an_engine_may_not_take_are_marked(planned: Result) -> None:
    best = replace(planned.best, formats=replace(planned.best.formats, latents="bfloat16"))
    told = emit(
        with_layout(replace(planned, ranked=(best,)), Layout(tensor=4, kv_shards=2)), VLLM, "m"
    )
    assert any("--kv-cache-dtype bfloat16" in sentence for sentence in told.unsure)
    assert any("--decode-context-parallel-size" in sentence for sentence in told.unsure)
    lines = told.text().splitlines()
    assert all(line.startswith("#") for line in lines if "not sure" in line)
    assert max(map(len, lines)) <= 100
    assert read_command(told.text()).layout == Layout(tensor=4, kv_shards=2)


def test_two_machines_side_by_side() -> None:
    asked = ("plan", "deepseek-v4-flash", "--compare", "rtx-pro-6000-x2", "rtx-pro-6000-x4")
    ran = metainfer(*asked)
    assert ran.code == 0 and "needs --power-w A,B" in ran.out and "--price-per-hour" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100
    given = ("--power-w", "1200,2400", "--price-per-hour", "2,4")
    told = json.loads(metainfer(*asked, *given, "--json").out)
    small, large = told["machines"]
    assert 1.0 < told["machines_of_first_per_second"]["requests_per_s"] < 4.0
    tokens = large["requests_per_s"] * (8192 + 512)
    assert large["tokens_per_joule"] == pytest.approx(tokens / 2400)
    assert large["cost_per_million_tokens"] == pytest.approx(4 / 3600 / tokens * 1e6)
    assert small["tokens_per_joule"] > 0
    assert "needs --" not in metainfer(*asked, *given).out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--power-w", "1,2"), "--power-w is of --compare, which is not given"),
        (("--compare", "rtx-pro-6000-x2"), "--compare takes two machines, not 1"),
        (("--compare", "h200-x1", "rtx-pro-6000-x4"), "h200-x1: no layout of 1 GPU holds"),
        (("--compare", "a", "b", "--emit", "vllm"), "--compare and --emit do not go together"),
        (("--emit", "vllm", "--explain"), "--emit has nothing to explain"),
        (("--from", "vllm serve m", "--engine", "b12x"), "--engine is of a plan"),
        (("--compare", "a", "b", "--price-per-hour", "3"), "is not two numbers above 0"),
        (("--compare", "a", "b", "--power-w", "1e400,1"), "is not two numbers above 0"),
        (("--compare", "a", "b", "--machine", "c"), "leave out --machine"),
    ],
)
def test_mistakes_are_sentences(arguments: tuple[str, ...], sentence: str) -> None:
    ran = metainfer("plan", "deepseek-v4-flash", *arguments)
    assert ran.code == 2 and sentence in ran.err and "hint:" in ran.err


def test_what_this_engine_has_not_done_is_said() -> None:
    asked = ("plan", "deepseek-v4-flash", "--machine", "rtx-pro-6000-x4")
    ran = metainfer(*asked)
    assert "several ranks of this engine ran on CPUs so far" in ran.out
    assert "compiled for sm_120 and not timed there" in " ".join(ran.out.split())
    stock = json.loads(metainfer(*asked, "--engine", "stock", "--json").out)
    assert stock["engine"] == "stock" and stock["engine_meaning"]
    assert not any("ran on CPUs" in note for note in stock["notes"])


def test_keys_in_a_command_are_not_repeated() -> None:
    command = "HF_TOKEN=hush NCCL_DEBUG=INFO vllm serve M --api-key=hush --api-key hush --port 80"
    written = [said.written for said in read_command(command).said]
    assert not any("hush" in text for text in written)
    assert "--port 80" in written and "HF_TOKEN=(not shown)" in written
