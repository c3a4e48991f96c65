"""`bench stages`: settings by name, traffic, turns that alternate, what the record says."""

from __future__ import annotations

import json
import math
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from metainfer.arch.tiny import tiny_arch, tiny_config
from metainfer.bench import stages
from metainfer.bench.contender import Timing
from metainfer.bench.contender_engine import timed_batch
from metainfer.bench.plot_stages import draw_stages
from metainfer.bench.side_process import Refused
from metainfer.bench.stage import parse_setting, sized
from metainfer.bench.stages import Contestant, StagesRun, measure, require_turns
from metainfer.bench.stages_report import record, text_report, wrong_positions
from metainfer.bench.stages_settings import StagesLoad
from metainfer.bench.traffic import Pattern, draw_arrivals
from metainfer.cli.bench_stages import Prepared, transformers_contestant
from metainfer.core.errors import MetainferError, UserError
from metainfer.hardware.machine import Gpu
from metainfer.ops.kernel_order import COMPOSED
from metainfer.plan.settings import EngineSettings
from tests.fakes.command import metainfer
from tests.fakes.machines import GIB, make_machine

ARCH = tiny_arch()
BASE = EngineSettings(max_num_seqs=3)
MACHINE = {"cpu": {"model": "Some Processor", "physical_cores": 2}, "gpus": []}
LOAD = StagesLoad(settings=("generic", "tuned"), rounds=3, input_lens=(32,), decode_batches=(4,))


def test_a_setting_is_a_stage_and_flags() -> None:
    assert parse_setting("tuned", BASE, ARCH).engine == BASE
    generic = parse_setting("generic", BASE, ARCH).engine
    assert generic.kernel_order is not None
    assert f"moe.experts={COMPOSED}" in generic.kernel_order.split(";")
    assert (generic.activations, generic.enforce_eager) == ("plain", True)
    assert generic.max_num_seqs == 3
    changed = parse_setting("adapted,--threads=2,--max-num-batched-tokens 4k", BASE, ARCH)
    assert (changed.stage, changed.engine.threads) == ("adapted", 2)
    assert (changed.engine.enforce_eager, changed.engine.shared_expert_stream) == (True, "off")
    assert changed.engine.async_scheduling is False
    assert changed.engine.tuned_kernels is False
    assert changed.engine.max_num_batched_tokens == 4000
    order = "*=cpu,reference;moe.experts=cpu"
    quoted = parse_setting(f"--kernel-order '{order}'", BASE, ARCH)
    assert (quoted.stage, quoted.engine.kernel_order) == ("tuned", order)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fastest", "'fastest' is no stage"),
        ("tuned,--no-such-flag=1", "no-such-flag"),
        ("tuned,--threads=many", "'many' is not a whole number"),
        ("tuned,--threads=0", "--threads 0 is below 1"),
        ("tuned '", "cannot be read"),
    ],
)
def test_a_setting_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_setting(text, BASE, ARCH)
    assert message in refused.value.message


def test_engines_are_sized_by_the_work() -> None:
    assert sized(EngineSettings(), ARCH, 100, 5).max_model_len == 100 + 5 * 64
    assert sized(BASE, ARCH, 100, 5).max_num_seqs == 3
    with pytest.raises(UserError, match="5000 tokens are more than the 4096"):
        sized(BASE, ARCH, 5000, 1)


def test_a_batch_is_timed_while_it_is_whole() -> None:
    """Sequence 0 has three tokens before 1 has its first; a token takes a second."""
    order = [0, 0, 0, 1, 0, 1, 0, 1, 0, 1]
    arrivals = [(index, float(n)) for n, index in enumerate(order)]
    begun: list[int] = []

    def timed(room: int) -> Timing:
        return timed_batch(iter(arrivals), 2, 3, room, lambda: begun.append(room))

    assert timed(9) == timed(6) == Timing(4, 4.0)
    assert begun == [9, 6]
    with pytest.raises(MetainferError, match="had its 4 tokens before all 2 had decoded 3"):
        timed(4)
    alone = [(0, 1.0), (0, 1.5)]
    assert timed_batch(alone, 1, 2, 2, lambda: begun.append(1)) == Timing(1, 0.5)


def test_traffic_is_poisson_log_uniform_and_goes_on() -> None:
    pattern = Pattern(400, 5.0, 10, 1000, 8, 0.3)
    arrivals = draw_arrivals(pattern, "a", 512)
    assert arrivals == draw_arrivals(pattern, "a", 512) != draw_arrivals(pattern, "b", 512)
    gaps = [b.at_s - a.at_s for a, b in pairwise(arrivals)]
    assert min(gaps) > 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.2)
    lengths = [len(arrival.prompt) for arrival in arrivals]
    assert (min(lengths) >= 10, max(lengths) <= 1000) == (True, True)
    middle = math.exp(sum(map(math.log, lengths)) / len(lengths))
    assert middle == pytest.approx(100, rel=0.25)
    later = [arrival for arrival in arrivals if arrival.continues]
    assert 40 < len(later) < 160
    for arrival in later:
        assert any(
            other.prompt == arrival.prompt[: len(other.prompt)]
            for other in arrivals
            if other.at_s < arrival.at_s
        )
    fresh = [arrival.prompt[:8] for arrival in arrivals if not arrival.continues]
    assert len(set(fresh)) == len(fresh)


class Scripted:
    """A side that takes so many seconds a token, and notes what it was asked."""

    def __init__(self, name: str, per_token_s: float, log: list[tuple[str, str]]) -> None:
        self.title = name
        self.ready = {"dtype": "float32", "longest_context": 4096}
        self.prompts: list[tuple[int, ...]] = []
        self._per_token_s = per_token_s
        self._log = log

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "memory":
            return {"peak_bytes": 5 * 10**8, "device_peak_bytes": 3 * 10**9}
        if do == "counted":
            counted = {"prompt_tokens": sum(map(len, self.prompts)), "cached_tokens": 0}
            return {**counted, "kernels_compiled": 3 if self.title == "generic" else 0}
        self._log.append((self.title, do))
        if do == "traffic":
            self.prompts += [tuple(arrival["prompt"]) for arrival in arguments["arrivals"]]
            return {
                "served": [
                    {"ttft_s": 0.1, "tpot_s": 0.01, "ended_s": 2.0 + n, "prompt_tokens": 9,
                     "output_tokens": 4, "cached_tokens": 0}
                    for n, _ in enumerate(arguments["arrivals"])
                ],
                "joules": 50.0,
            }  # fmt: skip
        self.prompts += map(tuple, arguments["prompts"])
        if do == "prefill" and self.title == "generic" and len(self.prompts[-1]) > 1000:
            return {"failed": "CUDA out of memory"}
        tokens = sum(map(len, arguments["prompts"]))
        if do == "decode":
            tokens = len(arguments["prompts"]) * (arguments["count"] - 1)
        seconds = tokens * self._per_token_s
        return {"tokens": tokens, "seconds": seconds, "joules": 2.0, "clocks": {"sm_mhz": 1500}}

    must = ask


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Sides without processes; gives the log of their turns."""
    log: list[tuple[str, str]] = []

    @contextmanager
    def process(one: Contestant) -> Iterator[Scripted]:
        yield Scripted(one.name, 0.01 if one.name == "generic" else 0.002, log)

    monkeypatch.setattr(stages, "_process", process)
    monkeypatch.setattr(stages, "REST_S", 0.0)
    return log


def run(load: StagesLoad) -> StagesRun:
    sides = [Contestant(name, {}, 1) for name in load.settings]
    return measure(load, sides, ARCH, lambda *_: None, lambda _: None)


def test_turns_alternate_and_the_first_round_is_not_kept(scripted: list[tuple[str, str]]) -> None:
    measured = run(LOAD)
    assert (measured.engines, measured.rounds) == ("together", 3)
    prefills = [name for name, do in scripted if do == "prefill"]
    assert prefills == ["generic", "tuned"] * 2 + ["tuned", "generic"] + ["generic", "tuned"]
    assert {len(turns) for side in measured.sides.values() for turns in side.turns.values()} == {3}
    made = record(measured, LOAD, "tiny", ARCH, MACHINE)
    prefill, decode, traffic = made["works"]
    assert prefill["sides"]["tuned"]["tokens_per_s"] == pytest.approx(500)
    assert prefill["sides"]["generic"]["ttft_s_p95"] == pytest.approx(0.32)
    assert decode["sides"]["tuned"]["tpot_s"] == pytest.approx(0.008)
    assert decode["sides"]["tuned"]["tokens_per_joule"] is None  # in under a second
    assert decode["sides"]["generic"]["tokens_per_joule"] == pytest.approx(4 * 31 / 2)
    assert traffic["sides"]["tuned"]["requests"] == 3 * LOAD.requests
    assert made["sides"]["tuned"]["clocks"] == {"sm_mhz": [1500, 1500]}
    assert made["sides"]["tuned"]["tokens"]["cached_tokens"] == 0
    text = text_report(made)
    assert made["sides"]["tuned"]["kernels_compiled"] == 0
    assert "generic: 3 kernels were compiled while requests waited" in text
    assert "tuned: 3 kernels" not in text
    assert "5.00 x" in text
    assert "engines beside each other" in text
    assert json.loads(json.dumps(made, default=str))["rounds"] == 3


def test_cold_work_with_cached_tokens_is_named(
    scripted: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second prefill on 5 tokens of a prompt are found in a cache."""

    def counted(side: Scripted, do: str) -> dict[str, Any]:
        told = Scripted.ask(side, do)
        seen = sum(len(prompt) == 32 for prompt in side.prompts)
        return told | {"cached_tokens": 5 * max(seen - 1, 0)} if do == "counted" else told

    monkeypatch.setattr(Scripted, "must", counted)
    made = record(run(LOAD), LOAD, "tiny", ARCH, MACHINE)
    assert made["not_cold"] == [
        {"side": side, "work": "prefill 32", "cached_tokens": 15} for side in LOAD.settings
    ]
    assert made["works"][1]["sides"]["tuned"]["cached_tokens"] == 0
    said = "NOT COLD: tuned, prefill 32: 15 prompt tokens came from a cache"
    assert said in text_report(made)


@pytest.mark.parametrize("multi_turn", [0.0, 0.5])
def test_traffic_is_cold_unless_turns_follow(
    scripted: list[tuple[str, str]], multi_turn: float
) -> None:
    load = replace(LOAD, multi_turn=multi_turn)
    measured = run(load)
    for side in measured.sides.values():
        side.turns["traffic"][0]["served"][0]["cached_tokens"] = 7
    found = record(measured, load, "tiny", ARCH, MACHINE)["not_cold"]
    assert [one["work"] for one in found] == ([] if multi_turn else ["traffic"] * 2)


def test_no_prompt_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    load = StagesLoad(settings=("tuned",), rounds=2, input_lens=(16, 24), multi_turn=0.0)
    side = Scripted("tuned", 0.001, [])
    monkeypatch.setattr(stages, "_process", lambda _: nullcontext(side))
    monkeypatch.setattr(stages, "REST_S", 0.0)
    run(load)
    assert len(set(side.prompts)) == len(side.prompts) > 20


def test_engines_that_do_not_fit_together_are_loaded_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, str]] = []
    loaded: list[str] = []

    @contextmanager
    def process(one: Contestant) -> Iterator[Scripted]:
        if loaded:
            raise Refused(f"{one.name} does not fit")
        loaded.append(one.name)
        yield Scripted(one.name, 0.001, log)
        loaded.remove(one.name)

    monkeypatch.setattr(stages, "_process", process)
    monkeypatch.setattr(stages, "REST_S", 0.0)
    measured = run(LOAD)
    assert (measured.engines, measured.rounds) == ("in-turns", 3)
    made = record(measured, LOAD, "tiny", ARCH, MACHINE)
    assert made["engines"] == "in-turns"
    # Each piece of work twice in a process: once to warm up, once that counts.
    prefills = [name for name, do in log if do == "prefill"]
    assert prefills == ["generic"] * 2 + ["tuned"] * 4 + ["generic"] * 4 + ["tuned"] * 2
    assert all(
        len(work["sides"]["tuned"].get("seconds", [0] * 3)) == 3 for work in made["works"][:2]
    )
    with pytest.raises(UserError, match="tuned does not fit"):
        run(replace(LOAD, engines="together"))


def test_what_fails_is_named_and_the_rest_goes_on(scripted: list[tuple[str, str]]) -> None:
    load = StagesLoad(
        settings=("generic", "tuned"), rounds=1, input_lens=(32, 2000), decode_batches=(1,),
        requests=0,
    )  # fmt: skip
    made = record(run(load), load, "tiny", ARCH, MACHINE)
    assert made["sides"]["generic"]["missing"] == {"prefill 2000": "CUDA out of memory"}
    long = next(work for work in made["works"] if work["name"] == "prefill 2000")
    assert set(long["sides"]) == {"tuned"}
    assert "generic, prefill 2000: CUDA out of memory" in text_report(made)
    picture = ET.fromstring(draw_stages(made))
    ids = {element.get("id", "") for element in picture.iter()}
    assert {"input-0", "input-1", "tpot-0-0", "device_peak_bytes-1"} <= ids


def test_a_side_that_does_not_start_misses_all_works(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = {"generic"}

    @contextmanager
    def process(one: Contestant) -> Iterator[Scripted]:
        if one.name in refusing:
            raise Refused(f"{one.name}: nothing runs it")
        yield Scripted(one.name, 0.001, [])

    monkeypatch.setattr(stages, "_process", process)
    monkeypatch.setattr(stages, "REST_S", 0.0)
    load = replace(LOAD, engines="in-turns", rounds=1, requests=0)
    made = record(run(load), load, "tiny", ARCH, MACHINE)
    assert set(made["sides"]["generic"]["missing"]) == {"prefill 32", "decode batch 4"}
    assert all(set(work["sides"]) == {"tuned"} for work in made["works"])
    assert "generic, prefill 32: generic: nothing runs it" in text_report(made)
    refusing.add("tuned")
    with pytest.raises(UserError, match="tuned: nothing runs it"):
        run(load)


@pytest.mark.skipif(find_spec("flash_mla") is not None, reason="FlashMLA is installed")
def test_the_setting_open_needs_what_it_runs() -> None:
    ran = metainfer("bench", "stages", "--settings", "tuned", "open,--threads=1")
    assert (ran.code, "FlashMLA" in ran.err) == (2, True)


def test_no_round_begins_behind_the_budget(scripted: list[tuple[str, str]]) -> None:
    load = StagesLoad(settings=("tuned",), rounds=2, input_lens=(32,), budget_s=0.0)
    measured = run(load)
    assert (measured.rounds, scripted) == (0, [])
    with pytest.raises(UserError, match="there was time for no turn that counts"):
        require_turns(measured)


def test_loading_counts_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that takes all of it leaves nothing to begin, as the error says."""
    asked: list[tuple[str, str]] = []

    @contextmanager
    def slow(one: Contestant) -> Iterator[Scripted]:
        time.sleep(0.05)
        yield Scripted(one.name, 0.001, asked)

    monkeypatch.setattr(stages, "_process", slow)
    measured = run(StagesLoad(settings=("tuned",), rounds=1, input_lens=(32,), budget_s=0.02))
    assert (measured.rounds, asked, measured.loaded_s >= 0.05) == (0, [], True)
    with pytest.raises(UserError, match=r"no turn that counts: loading took 0 s, and warming up"):
        require_turns(measured)


@pytest.mark.filterwarnings("error")
def test_what_was_not_measured_is_drawn_as_such(scripted: list[tuple[str, str]]) -> None:
    load = StagesLoad(settings=("generic",), rounds=1, input_lens=(2000,), decode_batches=(1,))
    measured = run(load)
    require_turns(measured)
    measured.sides["generic"].turns = {}
    with pytest.raises(UserError, match="nothing was measured: generic, prefill 2000: CUDA out"):
        require_turns(measured)
    made = record(measured, load, "tiny", ARCH, MACHINE)
    assert draw_stages(made).decode().count("not measured") == 2


def test_the_verb_measures_a_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    ran = metainfer(
        "bench", "stages", str(tmp_path), "--load-format", "dummy", "--layers", "4", "--device",
        "cpu", "--settings", "tuned", "--rounds", "1", "--input-lens", "40", "--decode-batches",
        "2", "--decode-context", "20", "--decode-len", "4", "--num-prompts", "2",
        "--request-rate", "50", "--traffic-lens", "8", "30", "--traffic-output-len", "3",
        "--engines", "in-turns", "--save-result", "--result-dir", str(tmp_path),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "each turn of a setting in a process of its own" in ran.out
    made = json.loads((tmp_path / "bench-stages.json").read_text())
    assert (tmp_path / "bench-stages.svg").is_file()
    assert made["arch"]["layers"] == 4
    side = made["sides"]["tuned"]
    assert side["receipt"]["settings"]["load_format"] == "dummy"
    assert side["receipt"]["plan"]["device"]["value"] == "cpu"
    assert side["tokens"]["cached_tokens"] == 0
    assert side["tokens"]["prompt_tokens"] >= 2 * 40
    assert side["receipt"]["longest_context"] == 4096
    assert {work["do"] for work in made["works"]} == {"prefill", "decode", "traffic"}
    assert all(work["sides"]["tuned"]["tokens_per_joule"] is None for work in made["works"])


def test_positions_are_checked_without_a_turn(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    ran = metainfer(
        "bench", "stages", str(tmp_path), "--load-format", "dummy", "--device", "cpu", "--settings",
        "tuned", "--rounds", "0", "--check-positions", "3", "--input-lens", "40", "300",
        "--num-prompts", "0", "--engines", "in-turns", "--save-result", "--result-dir",
        str(tmp_path),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "tuned: 4 positions of 255 tokens held against the references" in ran.out
    made = json.loads((tmp_path / "bench-stages.json").read_text())
    checked = made["sides"]["tuned"]["receipt"]["positions"]
    assert (checked["tokens"], checked["positions"][-2:]) == (255, [254, 255])
    attended = checked["ops"]["attention.sparse_prefill"]
    assert attended["checks"] > 4
    assert 0.0 < attended["error"] < attended["tolerance"]
    assert set(attended["by_position"]) == {str(p) for p in checked["positions"][:-1]}
    made["sides"]["tuned"]["receipt"]["positions"]["wrong"] = [
        {"op": "rope.rotate", "layer": 2, "position": 1299, "problem": "off by 0.5"}
    ]
    assert wrong_positions(made) == 1
    assert "WRONG: rope.rotate in layer 2 at position 1,299: off by 0.5" in text_report(made)


def test_prompts_that_warm_up_may_be_shorter(scripted: list[tuple[str, str]]) -> None:
    load = replace(LOAD, longest_warm_up=20, requests=0, rounds=1)
    side = Scripted("tuned", 0.001, [])
    lengths = [len(asked["prompts"][0]) for asked in _asked_of(load, side)]
    assert lengths == [20, 20, 32, 256]


def _asked_of(load: StagesLoad, side: Scripted) -> list[dict[str, Any]]:
    """What the turns of one side ask of it."""
    asked: list[dict[str, Any]] = []
    answer = side.ask

    def ask(do: str, **arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return answer(do, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side, "ask", ask)
        patch.setattr(stages, "_process", lambda _: nullcontext(side))
        run(replace(load, settings=("tuned",)))
    return asked


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", None])
def test_transformers_runs_on_the_device_of_the_engine(device: str | None) -> None:
    gpus = (Gpu("Quick", (9, 0), 80 * GIB, 80 * GIB),) * 2
    for there in (gpus, ()):
        ready = Prepared(
            make_machine(gpus=there), tiny_arch(), "tiny", EngineSettings(device=device), 2, []
        )
        expected = (device or "cuda") if there else "cpu"
        assert transformers_contestant(ready).setup["device"] == expected
