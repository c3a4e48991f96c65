"""Ways of collectives in a plan: from what was measured of so many ranks, else by bytes; and in
which form sums travel, which a verdict or a flag allows."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metainfer.arch.families import read_arch
from metainfer.core.errors import UserError
from metainfer.hardware.curves import COPY, MEASURED_HERE, RING, STORE, Curve
from metainfer.plan import comm_record
from metainfer.plan.comm_record import Compared, Way, keep, read
from metainfer.plan.plan import Origin, Value
from metainfer.plan.proof import judged, model_key
from metainfer.plan.proof import keep as keep_verdict
from metainfer.plan.ranks import HOST_MEMORY, NCCL, NONE
from metainfer.plan.routes import DECODE, PREFILL, Rival, Router
from metainfer.plan.settings import EngineSettings
from metainfer.plan.ways import collective_ways
from metainfer.plan.wire_proof import WireProof, wire_dtype, wire_judged, wire_proof
from tests.fakes.machines import make_machine
from tests.pure.test_proof import HERE, record, side

MACHINE = make_machine()
PEBBLE = read_arch("pebble")
SIZES = (1024, 2**20)
MEASURED = [
    Way("all_reduce", "plain", Rival("one-shot", SIZES, (2e-5, 4e-3))),
    Way("all_reduce", "plain", Rival("ring", SIZES, (9e-5, 1e-3))),
    Way("all_reduce", "plain", Rival("gloo", SIZES, (1e-6, 1e-6), ordered=False)),
    Way("all_reduce", "plain", Rival("two-shot", (), (), why_not="at 1.0 kB: wrong")),
    Way("all_reduce", "fp8", Rival("two-shot", SIZES, (3e-5, 1e-3))),
    Way("all_gather", "plain", Rival("gloo", SIZES, (1e-5, 1e-4))),
    Way("all_gather", "plain", Rival("shared memory", SIZES, (2e-5, 2e-4))),
]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(comm_record, "default_cache", lambda: tmp_path)
    return keep(MACHINE, 2, 4, "2026-01-31T10:00:00", MEASURED)


def ways(ranks: int = 2, threads: int = 4, wire: str = "plain") -> Value[str]:
    return collective_ways(MACHINE, HOST_MEMORY, ranks, threads, wire)


def test_without_measurements_bytes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ways()
    assert found.origin is Origin.DEFAULT
    assert found.value == (
        "all_reduce: one-shot to 65536, then two-shot; all_gather: shared memory; reduce_scatter:"
        " shared memory; all_to_all: shared memory"
    )
    assert "`metainfer bench comm --ranks 2` was not run here" in found.reason
    assert ways(ranks=1).value == NONE
    nccl = collective_ways(MACHINE, NCCL, 2, 0, "plain")
    assert Router.of_words(nccl.value).choose("all_gather", 7, DECODE) == "NCCL"


def test_what_was_measured_decides_by_bytes_and_says_how_long(measured: Path) -> None:
    found = ways()
    assert found.origin is Origin.MEASURED
    router = Router.of_words(found.value)
    assert router.choose("all_reduce", 1024, DECODE) == "one-shot"
    assert router.choose("all_reduce", 1025, PREFILL) == "ring"
    assert router.choose("all_gather", 1, PREFILL) == "gloo"
    assert router.choose("all_to_all", 1, PREFILL) == "shared memory"  # was not measured
    assert found.reason == (
        "bench comm on 2026-01-31: all_reduce one-shot 20 us at 1.0 kB (ring 90 us), ring 1.0 ms"
        " (one-shot 4.0 ms); all_gather likewise; by bytes alone: reduce_scatter, all_to_all, which"
        " it left out"
    )


def test_sums_in_8_bits_take_what_was_measured_in_8_bits(measured: Path) -> None:
    router = Router.of_words(ways(wire="fp8").value)
    assert router.choose("all_reduce", 1, PREFILL) == "two-shot"
    assert router.choose("all_reduce", 1, DECODE) == "one-shot"
    left_out = ways(wire="int8")
    assert "by bytes alone: all_reduce in int8, reduce_scatter" in left_out.reason
    assert Router.of_words(left_out.value).choose("all_reduce", 2**17, PREFILL) == "two-shot"


def test_what_does_not_count_is_told(measured: Path) -> None:
    assert isinstance(read(MACHINE, 2, 4), Compared)
    assert "is of 4 threads a rank, and the plan has 1" in ways(threads=1).reason
    assert "--ranks 3` was not run here" in ways(ranks=3).reason
    newer = replace(MACHINE, versions={**MACHINE.versions, "torch": "9.0"})
    assert "kept on 2026-01-31 is of other versions" in str(read(newer, 2, 4))
    text = measured.read_text()
    measured.write_text(text.replace('"version": 1', '"version": 0'))
    assert "is of another version" in ways().reason
    measured.write_text(text.replace("1048576", '"many"'))
    assert "kept cannot be read: invalid literal" in ways().reason
    measured.write_text("[]")
    assert "kept cannot be read" in ways().reason


def links(means: str, operation: str, start_s: float, per_s: float, gpus: int = 2) -> Curve:
    seconds = tuple(start_s + size / per_s for size in SIZES)
    return Curve(means, operation, tuple(range(gpus)), True, SIZES, seconds, True, MEASURED_HERE)


def test_gpus_take_what_curves_of_their_links_foretell() -> None:
    curves = (
        links(STORE, RING, 5e-6, 20e9),
        links(COPY, RING, 2e-5, 50e9),
        links("NCCL", "all_reduce", 3e-5, 10e9),
        links("NCCL", "all_gather", 1e-6, 60e9),
    )
    machine = replace(MACHINE, curves=curves)
    found = collective_ways(machine, NCCL, 2, 0, "plain")
    assert found.origin is Origin.MEASURED
    assert "by the curves of these GPUs: all_reduce one kernel by peer store" in found.reason
    router = Router.of_words(found.value)
    assert router.choose("all_reduce", 2**14, DECODE) == "one kernel by peer store"
    assert router.choose("all_reduce", 2**20, DECODE) == "NCCL"
    assert router.choose("all_reduce", 2**20, PREFILL) == "one-shot by copy engine"
    assert router.choose("all_gather", 2**24, PREFILL) == "NCCL"
    assert router.choose("reduce_scatter", 2**24, PREFILL) == "direct by copy engine"
    coded = Router.of_words(collective_ways(machine, NCCL, 2, 0, "fp8").value)
    assert coded.choose("all_reduce", 2**24, PREFILL).endswith("copy engine")
    others = collective_ways(machine, NCCL, 2, 0, "plain", first_gpu=2)  # of which nothing is known
    assert others.origin is Origin.DEFAULT and "`metainfer probe --measure`" in others.reason


def test_one_kernel_is_never_taken_for_more_than_it_holds() -> None:
    machine = replace(MACHINE, curves=(links(STORE, RING, 5e-6, 20e9),))
    router = Router.of_words(collective_ways(machine, NCCL, 2, 0, "plain").value)
    assert router.choose("all_reduce", 2**18, DECODE) == "one kernel by peer store"
    assert router.choose("all_reduce", 2**18 + 1, DECODE) == "NCCL"
    assert router.choose("all_reduce", 2**10, PREFILL) == "NCCL"


# ---- in which form sums travel ----


def verdict(wire: str = "fp8", date: str = "2026-02-01", ranks: int = 2, **more: Any) -> Any:
    made = copy.deepcopy(record(date=date, **more))
    made["needles"]["count"] = 0  # sums need none
    for name, travels in (("A", "plain"), ("B", wire)):
        one = side("bfloat16", "bfloat16")
        one["receipt"]["plan"] |= {
            "wire_dtype": {"value": travels},
            "tensor_parallel_size": {"value": ranks},
        }
        made["sides"][name] = one
    return made


def test_a_record_proves_sums_for_as_many_ranks() -> None:
    found = wire_judged(verdict(ranks=4))
    assert isinstance(found, WireProof)
    assert (found.wire, found.ranks) == ("fp8", 4)
    assert "passed it on 2026-02-01" in found.reason
    assert "does not hold sums in 8 bits" in str(wire_judged(verdict("plain")))
    assert "does not hold sums in 8 bits" in str(wire_judged(record()))  # older than wires
    mixed = verdict()
    mixed["sides"]["B"]["receipt"]["plan"]["cache_dtype"] = {"value": "fp8"}
    assert "the two sides differ in cache_dtype too" in str(wire_judged(mixed))
    assert "the two sides differ in wire_dtype too" in str(judged(mixed, PEBBLE))
    short = verdict()
    short["divergence"]["tokens"] = 100
    assert "100 predicted tokens are fewer" in str(wire_judged(short))


def test_the_latest_verdict_on_a_wire_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    two = EngineSettings(tensor_parallel_size=2)
    key = model_key(tmp_path, two)
    assert key is not None

    def found(settings: EngineSettings = two) -> str | None:
        proof = wire_proof(tmp_path, settings, HERE, tmp_path)
        return None if proof is None else proof.wire

    assert found() is None
    keep_verdict(verdict("fp8", "2026-02-01"), key, tmp_path)
    keep_verdict(record(date="2026-02-09"), key, tmp_path)  # of caches
    assert found() == "fp8"
    assert found(EngineSettings(tensor_parallel_size=4)) is None
    assert found(EngineSettings(tensor_parallel_size=2, load_format="dummy")) is None
    keep_verdict(verdict("int8", "2026-02-02"), key, tmp_path)
    assert found() == "int8"
    keep_verdict(verdict("int8", "2026-02-03", passed=False), key, tmp_path)
    assert found() == "fp8"
    keep_verdict(verdict("fp8", "2026-02-04", passed=False), key, tmp_path)
    assert found() is None


def test_a_flag_wins_then_a_verdict_then_plain_sums() -> None:
    seen = WireProof("int8", 2, "it was seen", 1024)
    asked = EngineSettings(wire_dtype="fp8")

    def chosen(settings: EngineSettings, found: WireProof | None) -> tuple[str, Origin, str]:
        value = wire_dtype(PEBBLE, settings, 2, found)
        return value.value, value.origin, value.reason

    none = EngineSettings()
    assert chosen(none, None)[:2] == ("plain", Origin.DEFAULT)
    assert chosen(none, None)[2] == "no record of bench quality with 2 ranks allows 8 bits"
    assert chosen(none, seen) == ("int8", Origin.MEASURED, "it was seen")
    value, origin, reason = chosen(asked, seen)
    assert (value, origin) == ("fp8", Origin.FLAG)
    assert reason.endswith("; no record of bench quality with 2 ranks allows it")
    assert chosen(EngineSettings(wire_dtype="plain"), seen)[:2] == ("plain", Origin.FLAG)
    assert wire_dtype(PEBBLE, none, 1, seen).value == "plain"


def test_8_bits_that_cannot_be_are_refused() -> None:
    asked = EngineSettings(wire_dtype="fp8")
    with pytest.raises(UserError, match="--wire-dtype fp8: one rank has nobody to add up with"):
        wire_dtype(PEBBLE, asked, 1, None)
    odd = replace(PEBBLE, hidden_size=200)
    with pytest.raises(UserError, match="128 numbers share a scale, and the rows of .* have 200"):
        wire_dtype(odd, asked, 2, None)
    assert wire_dtype(odd, EngineSettings(), 2, WireProof("fp8", 2, "", 1024)).value == "plain"
    with pytest.raises(UserError, match="--wire-dtype fp4 is not one of plain, fp8, int8"):
        EngineSettings(wire_dtype="fp4")
