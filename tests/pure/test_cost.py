"""The cost model: counts against figures counted by hand, rates, transfers, orders of layouts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from metainfer.arch.shape_of import read_shape
from metainfer.core.errors import MetainferError, UserError
from metainfer.hardware.curves import MEASURED_HERE, Curve, Rate
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Machine
from metainfer.plan.cost.constants import INFERRED, MEASURED, PUBLISHED, read_constants
from metainfer.plan.cost.experts import largest_of, skew, touched
from metainfer.plan.cost.parts import EXPERTS, INDEXER, STREAMS, Share
from metainfer.plan.cost.phases import TRANSFERS, Phases
from metainfer.plan.cost.predict import Prediction, predict
from metainfer.plan.cost.rates import Rates
from metainfer.plan.cost.transfers import ALL_GATHER, ALL_REDUCE, Transfers
from metainfer.plan.cost.work import step_work
from metainfer.plan.layouts import Formats, Layout, Layouts
from metainfer.plan.workload import Workload

CONSTANTS = read_constants()
ONE_RANK = {"tensor": 1, "context": 1, "expert": 1, "slices": 1}


def share(rows: int, tokens: int, decode: bool = False, **more: int) -> Share:
    return Share(rows, tokens, rows if decode else 1, decode, **{**ONE_RANK, **more})


def flops(model: str, one: Share) -> float:
    return sum(part.flops for part in step_work(read_shape(model), one)) / one.rows


@pytest.mark.parametrize(
    ("model", "tokens", "counted"),
    [
        ("deepseek-v4-flash", 4096, 28.0e9),
        ("deepseek-v4-flash", 131072, 41.6e9),
        ("deepseek-v3.2", 4096, 112.0e9),
        ("deepseek-v3.2", 131072, 238.9e9),
        ("glm-5.3", 4096, 101.6e9),
        ("glm-5.3", 131072, 123.5e9),
    ],
)
def test_operations_of_a_prompt_token(model: str, tokens: int, counted: float) -> None:
    # One row at the position: linear part, attention and indexer counted by hand.
    assert flops(model, share(1024, tokens)) == pytest.approx(counted, rel=0.015)


def test_a_prompt_of_v41_leaves_out_half_of_the_layers() -> None:
    whole = flops("deepseek-v4.1-flash", replace(share(8192, 8192), replays=False))
    part = flops("deepseek-v4.1-flash", share(8192, 8192))
    assert whole == pytest.approx(34.4e9, rel=0.03)
    assert part == pytest.approx(17.4e9, rel=0.05)


@pytest.mark.parametrize(
    ("model", "counted"),
    [("deepseek-v4-flash", 11.24e9), ("deepseek-v4.1-flash", 12.72e9), ("deepseek-v3.2", 38.5e9)],
)
def test_bytes_of_a_decode_step(model: str, counted: float) -> None:
    parts = step_work(read_shape(model), share(1, 4096, decode=True))
    assert sum(part.bytes for part in parts) == pytest.approx(counted, rel=0.04)


def test_tensor_ranks_repeat_streams_and_indexer_and_context_ranks_do_not() -> None:
    shape = read_shape("deepseek-v4-flash")

    def by_group(one: Share) -> dict[str, float]:
        sums: dict[str, float] = {}
        for part in step_work(shape, one):
            sums[part.group] = sums.get(part.group, 0.0) + part.flops + part.bytes
        return sums

    alone = by_group(share(8192, 32768))
    tensor = by_group(share(8192, 32768, tensor=8, slices=8))
    context = by_group(share(8192, 32768, context=8, slices=8))
    for group in (STREAMS, INDEXER):
        assert tensor[group] == pytest.approx(alone[group])
        assert context[group] < 0.2 * alone[group]
    assert tensor[EXPERTS] < 0.2 * alone[EXPERTS]


def test_experts_that_rows_touch() -> None:
    assert touched(256, 6, 1) == pytest.approx(6)
    assert touched(256, 6, 10_000) == pytest.approx(256)
    # Eight ranks with whole experts: the busiest reads more than its eighth, never more than all.
    assert 6 / 8 < touched(256, 6, 1, parts=8) <= 6
    assert touched(256, 6, 10_000, parts=8) == pytest.approx(32)
    assert largest_of(2) == pytest.approx(0.5642, abs=1e-4)
    assert largest_of(8) == pytest.approx(1.4236, abs=0.02)
    assert skew(256, 1, 0.5) == 1.0
    assert 1.0 < skew(256, 2, 0.5) < skew(256, 8, 0.5)


def rates_of(machine: Machine) -> Rates:
    return Rates(machine, CONSTANTS, CONSTANTS.profile("metainfer"))


def test_a_rate_comes_from_the_record_before_the_card_and_its_nominal_figures() -> None:
    machine = machine_of("rtx-6000d-x8")
    nominal = rates_of(machine).of("experts fp4", 192.0)
    assert nominal.origin == INFERRED and "nominal" in nominal.why
    own = (*machine.rates, Rate("experts fp4", 8192, 3e14, f"{MEASURED_HERE}, today"))
    measured = rates_of(replace(machine, rates=own)).of("experts fp4", 192.0)
    assert (measured.origin, measured.per_s) == (MEASURED, 3e14)
    published = rates_of(machine_of("rtx-pro-6000-x8")).of("experts fp4", 192.0)
    assert published.origin == PUBLISHED
    # A product of few rows says how long a start takes, not what a rate is.
    assert rates_of(machine_of("h200-x1")).of("product fp8", 16.0).per_s > 5e14


def test_cards_without_e4m3_multiply_bf16() -> None:
    assert not rates_of(machine_of("a100-pcie-x8")).multiplies_fp8
    assert rates_of(machine_of("l40s-x8")).multiplies_fp8


def test_unknown_cards_are_told_and_not_guessed() -> None:
    machine = machine_of("rtx-pro-6000-x2")
    assert not isinstance(machine.gpus, Unknown)
    strange = tuple(
        replace(gpu, name="Acme 1", memory_bytes_per_s=Unknown("nobody looked"))
        for gpu in machine.gpus
    )
    phases = phases_of(replace(machine, gpus=strange, rates=()))
    assert phases.problem == "the Acme 1 is no listed card and its memory bandwidth is not recorded"
    with pytest.raises(MetainferError, match="Acme 1"):
        predict(phases, both(Layout()), Formats(), Workload())


def transfers_of(machine: Machine, profile: str = "metainfer") -> Transfers:
    return Transfers(machine, CONSTANTS, CONSTANTS.profile(profile))


def test_small_exchanges_go_by_stores_and_large_ones_by_rings() -> None:
    transfers = transfers_of(machine_of("rtx-pro-6000-x4"))
    small = transfers.exchange(ALL_REDUCE, 8192, 4)
    large = transfers.exchange(ALL_REDUCE, 96 * 2**20, 4)
    assert small.means == "one exchange" and small.seconds == pytest.approx(6.4e-6, rel=0.2)
    assert large.means == "ring of copies" and large.seconds == pytest.approx(2.886e-3, rel=0.1)


@pytest.mark.parametrize("name", ["rtx-pro-6000-x8", "l40s-x8", "rtx-4090-x4", "a100-pcie-x8"])
def test_exchanges_take_longer_with_size_and_gathers_less_than_sums(name: str) -> None:
    transfers = transfers_of(machine_of(name))
    times = [transfers.exchange(ALL_REDUCE, 2.0**n, 4).seconds for n in range(10, 30)]
    assert all(a <= 1.02 * b for a, b in itertools.pairwise(times))
    for n in (20, 25):
        gathered = transfers.exchange(ALL_GATHER, 2.0**n, 4).seconds
        assert gathered < transfers.exchange(ALL_REDUCE, 2.0**n, 4).seconds


def without_peers(machine: Machine) -> Machine:
    assert not isinstance(machine.peers, Unknown)
    peers = tuple(replace(peer, p2p=False) for peer in machine.peers)
    return replace(machine, peers=peers, curves=())


def test_groups_that_share_a_link_share_its_rate() -> None:
    machine = replace(machine_of("rtx-pro-6000-x8"), curves=())
    links = transfers_of(machine)._links
    # Two cards a switch: a ring of 8 crosses each uplink once a way, all to all many times.
    assert links.ring(8, 1) == pytest.approx(links.ring(2, 4))
    assert links.all_to_all(8, 1) < links.ring(8, 1)
    sockets = transfers_of(replace(machine_of("l40s-x8"), curves=()))._links
    assert sockets.crosses_sockets(range(8)) and not sockets.crosses_sockets(range(4))


def phases_of(machine: Machine, model: str = "deepseek-v4-flash", profile: str = "b12x") -> Phases:
    return Phases(read_shape(model), machine, CONSTANTS, CONSTANTS.profile(profile))


def both(layout: Layout) -> Layouts:
    return Layouts(layout, replace(layout, tensor=layout.group, context=1))


def told(
    machine: str | Machine,
    layout: Layout,
    model: str = "deepseek-v4-flash",
    profile: str = "b12x",
    workload: Workload | None = None,
    formats: Formats | None = None,
) -> Prediction:
    record = machine_of(machine) if isinstance(machine, str) else machine
    phases = phases_of(record, model, profile)
    return predict(phases, both(layout), formats or Formats(), workload or Workload())


TP2, TP4, TP8 = Layout(tensor=2), Layout(tensor=4), Layout(tensor=8)


def test_order_of_replicas_and_ranks() -> None:
    two = told("rtx-pro-6000-x4", replace(TP2, replicas=2)).input_per_s
    assert two > 1.5 * told("rtx-pro-6000-x4", TP4).input_per_s


def test_order_of_two_and_four_ranks() -> None:
    gain = told("rtx-pro-6000-x4", TP4).input_per_s / told("rtx-pro-6000-x2", TP2).input_per_s
    assert 1.05 < gain < 1.25  # published: 1.15


@pytest.mark.parametrize(
    ("machine", "model"),
    [("rtx-pro-6000-x8", "deepseek-v4.1-flash"), ("b300-x8", "deepseek-v4-flash")],
)
def test_order_of_four_and_eight_ranks(machine: str, model: str) -> None:
    long = Workload(131072, 512, 1)
    chunks = Formats(chunk_rows=2048)
    four, eight = (
        told(machine, replace(layout, expert=layout.tensor), model, "stock", long, chunks)
        for layout in (TP4, TP8)
    )
    assert 1.05 < eight.input_per_s / four.input_per_s < 1.25  # published: 1.12 to 1.17


@pytest.mark.parametrize("profile", ["metainfer", "b12x", "stock"])
def test_order_of_switches_and_sockets(profile: str) -> None:
    switches = told("rtx-pro-6000-x8", TP8, profile=profile).input_per_s
    assert switches > told("rtx-pro-6000-x8-two-sockets", TP8, profile=profile).input_per_s


@pytest.mark.parametrize("profile", ["metainfer", "b12x", "stock"])
def test_order_of_peer_access(profile: str) -> None:
    machine = machine_of("rtx-pro-6000-x4")
    peers = told(replace(machine, curves=()), TP4, profile=profile)
    none = told(without_peers(machine), TP4, profile=profile)
    assert none.input_per_s < 0.8 * peers.input_per_s
    assert none.tpot_s > 1.1 * peers.tpot_s


def test_order_of_collectives_on_two_islands() -> None:
    machine = machine_of("l40s-x8")
    default = transfers_of(machine, "stock").exchange(ALL_REDUCE, 64 * 2**20, 8)
    ring = transfers_of(machine).exchange(ALL_REDUCE, 64 * 2**20, 8)
    assert default.seconds > 5 * ring.seconds
    assert told(machine, TP8, profile="metainfer").input_per_s > 3 * (
        told(machine, TP8, profile="stock").input_per_s
    )


def test_prefill_decays_with_position_and_context_parallel_beats_tensor_parallel() -> None:
    short, long = (
        told("rtx-pro-6000-x2", TP2, workload=Workload(size, 1, 1)).input_per_s
        for size in (8192, 131072)
    )
    assert 0.75 < long / short < 0.95  # published: 13.8k and 12.2k
    tokens = told("rtx-pro-6000-x4", Layout(context=4), profile="metainfer")
    heads = told("rtx-pro-6000-x4", TP4, profile="metainfer")
    assert tokens.input_per_s > 1.3 * heads.input_per_s


def test_sharded_caches_cost_decoding_and_less_attention() -> None:
    plain = told("rtx-pro-6000-x8", TP8, "glm-5.3", "metainfer")
    sharded = told("rtx-pro-6000-x8", replace(TP8, kv_shards=8), "glm-5.3", "metainfer")
    mine, other = (one.decode.by_group() for one in (sharded, plain))
    assert mine[TRANSFERS] > other[TRANSFERS]
    assert mine["indexer"] < other["indexer"]


def test_sharded_caches_are_gathered_for_later_chunks_alone() -> None:
    machine, shape = machine_of("rtx-pro-6000-x8"), read_shape("glm-5.3")
    phases = Phases(shape, machine, CONSTANTS, CONSTANTS.profile("metainfer"))

    def gathered(tokens: int, seqs: int) -> float:
        sharded, plain = (
            phases.chunk(layout, Formats(), 8192, tokens, seqs).by_group()[TRANSFERS]
            for layout in (replace(TP8, kv_shards=8), TP8)
        )
        return sharded - plain

    # Whole prompts see what their own chunk computes on every rank.
    assert gathered(8192, 1) == gathered(4096, 2) == 0.0
    assert gathered(16384, 1) == pytest.approx(gathered(8192, 2), rel=1e-6)
    # 656 bytes of an entry, 132 of its index keys where a layer has some; 7 of 8 parts come in.
    size = 8192 * (78 * 656 + 21 * 132)
    assert gathered(16384, 1) > 7 / 8 * size / 64e9


def test_host_links_that_were_measured_at_once_are_taken() -> None:
    machine, profile = machine_of("rtx-4090-x4"), CONSTANTS.profile("metainfer")
    slow = Curve(
        "from host", "copy", (0, 1, 2, 3), True, (2**20, 2**28), (1e-3, 2**28 / 2e9), True,
        MEASURED_HERE,
    )  # fmt: skip
    measured = replace(machine, curves=(*machine.curves, slow))
    by_tree, as_measured = (Transfers(m, CONSTANTS, profile) for m in (machine, measured))
    assert by_tree.from_host() > 15e9
    assert as_measured.from_host() == pytest.approx(2e9)
    staged = as_measured.exchange(ALL_REDUCE, 64e6, 4)
    assert staged.seconds > 2 * by_tree.exchange(ALL_REDUCE, 64e6, 4).seconds


def test_pipelines_wait_for_one_prompt_and_not_for_many() -> None:
    layout = Layout(pipeline=4)
    few = told("rtx-pro-6000-x4", layout, workload=Workload(8192, 1, 1))
    many = told("rtx-pro-6000-x4", layout, workload=Workload(8192, 1, 64))
    assert few.input_per_s < 0.5 * many.input_per_s


def test_a_rate_of_requests_adds_a_wait() -> None:
    free = told("rtx-pro-6000-x2", TP2)
    some = told("rtx-pro-6000-x2", TP2, workload=Workload(request_rate_per_s=0.3))
    busy = told("rtx-pro-6000-x2", TP2, workload=Workload(request_rate_per_s=0.5))
    assert free.load is None and free.ttft_s == free.idle_ttft_s
    assert some.load is not None and busy.load is not None
    assert 0.0 < some.load < busy.load < 1.0
    assert free.ttft_s == some.idle_ttft_s < some.ttft_s < busy.ttft_s < 2 * free.ttft_s


def test_more_requests_than_are_answered_have_no_time_to_a_first_token() -> None:
    most = told("rtx-pro-6000-x2", TP2).requests_per_s
    for share, overloaded in ((0.99, False), (1.0001, True), (50.0, True)):
        found = told("rtx-pro-6000-x2", TP2, workload=Workload(request_rate_per_s=share * most))
        assert found.load == pytest.approx(share)
        assert (found.ttft_told == "overload") is overloaded is (found.ttft_or_none is None)
        assert found.idle_ttft_s < 2.0


def test_predictions_say_what_they_rest_on() -> None:
    one = told("rtx-pro-6000-x8", TP8)
    assert 0.02 < one.input_error < 0.3 and 0.02 < one.decode_error < 0.3
    assert {item.origin for item in one.prefill.items} <= {MEASURED, PUBLISHED, INFERRED}
    assert all(item.why for item in one.prefill.items)
    assert one.prefill.seconds == pytest.approx(1 / one.input_per_s, rel=1e-6)


def test_an_engine_that_is_none() -> None:
    with pytest.raises(UserError, match="no engine profile 'x'"):
        CONSTANTS.profile("x")
