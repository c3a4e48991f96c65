"""The cost model: what runs in place of what, rows from far, halos, ways through the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.arch.shape_of import read_shape
from metainfer.hardware.curves import FROM_HOST, MEASURED_HERE, STAGED, TO_HOST, Curve
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Machine
from metainfer.plan.cost.constants import MEASURED, Profile, read_constants
from metainfer.plan.cost.links import Links
from metainfer.plan.cost.parts import ATTENTION, INDEXER, Part, Share
from metainfer.plan.cost.phases import HOST, Phases
from metainfer.plan.cost.rates import Rates
from metainfer.plan.cost.transfers import ALL_GATHER, ALL_REDUCE, Transfers
from metainfer.plan.cost.work import step_work
from metainfer.plan.layouts import Formats, Layout
from metainfer.plan.published import read_published, shape_of_case
from metainfer.plan.validate import Asked

CONSTANTS = read_constants()


def profile_of(name: str, **more: object) -> Profile:
    return replace(CONSTANTS.profile(name), **more)


def phases_of(machine: str, model: str, profile: Profile) -> Phases:
    return Phases(read_shape(model), machine_of(machine), CONSTANTS, profile)


def staged(gpus: int, operation: str = "ring", source: str = MEASURED_HERE) -> Curve:
    sizes, seconds = (2**16, 2**20, 2**26), (50e-6, 400e-6, 22e-3)
    return Curve(STAGED, operation, tuple(range(gpus)), True, sizes, seconds, True, source)


def without_peers(*curves: Curve) -> Machine:
    return replace(machine_of("rtx-4090-x4"), curves=curves)


def test_measured_ways_through_the_host_are_what_exchanges_count_with() -> None:
    curve = staged(4)
    mine = Transfers(without_peers(curve), CONSTANTS, profile_of("metainfer"))
    inferred = Transfers(without_peers(), CONSTANTS, profile_of("metainfer"))
    # Of four ranks an all-reduce brings in 2 x 3 / 4 of what each has.
    found = mine.exchange(ALL_REDUCE, 2.0**24, 4)
    assert (found.means, found.origin) == ("host memory", MEASURED)
    assert found.seconds == pytest.approx(curve.seconds_of(1.5 * 2**24))
    assert found.seconds != pytest.approx(inferred.exchange(ALL_REDUCE, 2.0**24, 4).seconds)
    # Of two ranks a gather brings in half; pairs of four cards share the host.
    assert mine.exchange(ALL_GATHER, 2.0**24, 2).seconds == pytest.approx(curve.seconds_of(2**23))
    assert mine.send(2.0**20, 4, 1).seconds == pytest.approx(curve.seconds_of(2**20))


def test_the_link_of_one_card_to_the_host_counts_as_it_was_measured() -> None:
    def host(*rates: tuple[bool, float]) -> float:
        curves = tuple(
            Curve(FROM_HOST, "copy", (0,), both, (2**28,), (2**28 / rate,), True, MEASURED_HERE)
            for both, rate in rates
        )
        return Links(replace(machine_of("h200-x1"), curves=curves), CONSTANTS).from_host

    assert host((False, 12e9)) == pytest.approx(12e9)
    assert host((True, 8e9), (False, 12e9)) == pytest.approx(12e9)  # both ways at once is less
    assert host() > 50e9


def test_reads_of_host_memory_go_one_way_and_exchanges_both() -> None:
    """A host that takes slowly gives rows of tables as fast as it gives."""
    every = (0, 1, 2, 3)

    def links(**rates: float) -> Links:
        curves = (
            Curve(means, "copy", every, True, (2**28,), (2**28 / rates[key],), True, MEASURED_HERE)
            for means, key in ((FROM_HOST, "gives"), (TO_HOST, "takes"))
            if key in rates
        )
        return Links(without_peers(*curves), CONSTANTS)

    both = CONSTANTS.transfer("staged")
    found = links(gives=20e9, takes=5e9)
    assert found.from_host == pytest.approx(20e9)
    assert found.staged == pytest.approx(both * 5e9)
    # Of what was not looked at, as the other way is.
    assert links(takes=5e9).from_host == pytest.approx(5e9)
    assert links(gives=20e9).staged == pytest.approx(both * 20e9)
    by_tree = links()
    assert by_tree.staged == pytest.approx(both * by_tree.from_host)


def test_a_smaller_group_says_nothing_of_a_larger_one() -> None:
    of_two = Transfers(without_peers(staged(2)), CONSTANTS, profile_of("metainfer"))
    inferred = Transfers(without_peers(), CONSTANTS, profile_of("metainfer"))
    for transfers in (of_two, inferred):
        assert transfers.exchange(ALL_REDUCE, 2.0**24, 4).origin != MEASURED
    assert of_two.exchange(ALL_REDUCE, 2.0**24, 2).origin == MEASURED


def waited(phases: Phases, layout: Layout, engram: str, rows: int = 1) -> float:
    step = phases.decode(layout, Formats(engram=engram), rows, 4096)
    return sum(item.seconds for item in step.items if "n-gram" in item.why)


def test_decode_steps_wait_for_rows_of_tables_that_are_not_on_gpus() -> None:
    phases = phases_of("rtx-pro-6000-x8", "deepseek-v4.1-flash", profile_of("metainfer"))
    layout = Layout(tensor=8)
    assert waited(phases, layout, "gpu") == 0.0
    # One layer hides 24 reads of a row, and no more than that of 64 rows; the table before layer
    # 14 comes after that before layer 1, and has thirteen layers more.
    assert waited(phases, layout, "disk") == 0.0
    step = phases.decode(layout, Formats(engram="gpu"), 64, 4096).seconds
    reads = 64 * 24 / CONSTANTS.transfer("disk_reads_per_s")
    each = CONSTANTS.transfer("disk_row_us") * 1e-6 + reads
    first = each - step / 40
    later = max(0.0, 2 * each - step * 14 / 40 - first)
    disk = waited(phases, layout, "disk", rows=64)
    assert disk == pytest.approx(first + later, rel=1e-6)
    assert 0.0 <= waited(phases, layout, "host", rows=64) < disk
    # One disk serves all replicas, and reads grow with the batch.
    two = waited(phases, Layout(tensor=4, replicas=2), "disk", rows=64)
    assert two > 1.5 * waited(phases, Layout(tensor=4), "disk", rows=64)
    assert waited(phases_of("rtx-pro-6000-x8", "glm-5.3", profile_of("metainfer")), layout,
                  "disk") == 0.0  # fmt: skip


def test_halos_of_sharded_prompts_go_to_one_neighbour() -> None:
    phases = phases_of("rtx-pro-6000-x8", "deepseek-v4-flash", profile_of("metainfer"))
    layout, rows = Layout(context=8), 8192
    exchanges = list(phases._halo(layout, rows))
    sends = [(one, count) for one, count in exchanges if one.means == "copies"]
    # 8 blocks of 128 latents a rank and layer, 592 bytes each; of the 21 layers whose windows
    # overlap four rows of keys and gates, of entries and of index keys, in fp32.
    assert sum(count for _, count in sends) == 43
    latents, overlap = 8 * 128 * 592, 8 * 4 * 4 * 2 * (512 + 128)
    link = phases.transfers._links.ring(8, 1) * CONSTANTS.transfer("ring")
    by_count = {count: one.seconds for one, count in sends}
    assert by_count[22] == pytest.approx(latents / link + 20e-6)
    assert by_count[21] == pytest.approx((latents + overlap) / link + 20e-6)
    # Entries and keys of CSA and HCA layers go to all.
    assert sum(count for one, count in exchanges if one.means != "copies") == 41
    # Gathering all latents everywhere would take seven times as long.
    gathered = phases.transfers.exchange(ALL_GATHER, rows * 592.0, 8).seconds
    assert by_count[22] < 0.5 * gathered


def test_engines_without_kernels_run_other_ones() -> None:
    machine, stock = machine_of("rtx-pro-6000-x2"), CONSTANTS.profile("stock")
    part = Part("experts", "experts fp4", 192.0, 1e12, 1e6, width=2048)
    marlin = Rates(machine, CONSTANTS, stock).seconds(part, prefill=True)[1]
    assert "W4A16" in marlin.why
    own = Rates(machine, CONSTANTS, CONSTANTS.profile("metainfer")).seconds(part, prefill=True)[1]
    assert marlin.per_s < 0.6 * own.per_s
    index = Part(INDEXER, "index fp8", 8192.0, 1e12, 1e6)
    for name, narrow in (("rtx-pro-6000-x2", False), ("b300-x8", True)):
        found = Rates(machine_of(name), CONSTANTS, stock).seconds(index, prefill=True)[1]
        assert ("fp8" in found.why) == narrow and ("bf16" in found.why) != narrow


def test_nvfp4_multiplies_itself_where_the_engine_has_it_and_the_card() -> None:
    part = Part("experts", "experts nvfp4", 192.0, 1e12, 1e6, width=2048)
    machine = machine_of("rtx-6000d-x8")
    itself, as_fp4 = (
        Rates(machine, CONSTANTS, profile_of(name)).seconds(part, prefill=True)[1]
        for name in ("b12x", "metainfer")
    )
    assert itself.per_s == pytest.approx(2.0 * as_fp4.per_s, rel=1e-3)
    ada = Rates(machine_of("l40s-x8"), CONSTANTS, profile_of("b12x"))
    assert "bf16" in ada.seconds(part, prefill=True)[1].why


def test_composed_operations_go_through_memory() -> None:
    machine = machine_of("rtx-6000d-x8")
    parts = step_work(read_shape("deepseek-v4.1-flash"), Share(8192, 122880, 1, False, 8, 1, 1, 8))
    attention = [part for part in parts if part.group == ATTENTION]
    fused = Rates(machine, CONSTANTS, profile_of("stock"))
    composed = Rates(machine, CONSTANTS, profile_of("stock", composed={"attention": 20.0}))
    more = sum(
        composed.seconds(part, prefill=True)[0] - fused.seconds(part, prefill=True)[0]
        for part in attention
    )
    keys = sum(part.between for part in attention)
    assert more > 0.9 * 20.0 * keys / composed.memory().per_s * (1 - 1 / 20)
    # A score of each head, in fp32: 32 heads, half a key for each token before.
    scores = [part.between for part in parts if part.group == INDEXER and part.between]
    assert sum(scores) > 8192 * 110_000 / 2 * 32 * 4


def test_splitting_the_rows_of_the_indexer_divides_it_and_gathers_choices() -> None:
    whole = phases_of("rtx-pro-6000-x8", "glm-5.3", profile_of("b12x"))
    split = phases_of("rtx-pro-6000-x8", "glm-5.3", profile_of("b12x", splits_queries=True))
    mine, other = (
        phases.chunk(Layout(tensor=8), Formats(), 8192, 65536, 1).by_group()
        for phases in (split, whole)
    )
    assert mine["indexer"] < 0.2 * other["indexer"]
    assert mine["transfers"] > other["transfers"]
    # Decoding has one row to score.
    steps = [phases.decode(Layout(tensor=8), Formats(), 1, 65536) for phases in (split, whole)]
    assert steps[0].seconds == steps[1].seconds


def test_hosts_that_start_kernels_bound_small_chunks_and_steps_without_graphs() -> None:
    phases = phases_of("h200-x1", "deepseek-v4-flash", profile_of("metainfer"))
    small, large = (phases.chunk(Layout(), Formats(), n, n, 1) for n in (256, 16384))
    started = CONSTANTS.profile("metainfer").launch_us * 43e-6
    assert small.seconds == pytest.approx(started + 1500e-6, rel=1e-6)
    assert large.by_group()[HOST] == pytest.approx(1500e-6)
    eager = phases_of("h200-x1", "deepseek-v4-flash", profile_of("metainfer", layer_us=100.0))
    steps = [one.decode(Layout(), Formats(), 1, 2048).seconds for one in (eager, phases)]
    assert steps[0] - steps[1] == pytest.approx(43 * 100e-6)


def test_cases_cut_models_and_engines_take_their_share_of_memory() -> None:
    rows = {row.id: row for row in read_published().rows}
    shape = shape_of_case(rows["own-4-layers-8k"].case)
    assert [layer.ratio for layer in shape.side.layers] == [0, 4, 128, 4]
    assert shape.vocab_size == 32768
    assert shape_of_case(rows["own-21-layers-8k"].case).num_layers == 21
    case = rows["glm-context-tp8"].case
    machine = machine_of(case.machine)
    assert not isinstance(machine.gpus, Unknown)
    asked = Asked()
    fewer, more = (asked.answer(replace(case, engine=e), CONSTANTS) for e in ("stock", "b12x"))
    # A twentieth of a card, by the bytes of a token's entries and index keys.
    lost = 0.05 * machine.gpus[0].memory_bytes / (78 * 656 + 21 * 132)
    assert more - fewer == pytest.approx(lost, rel=0.1)
