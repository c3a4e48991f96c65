"""The plan: origins and reasons, a ledger that adds up, refusals in a sentence with a way out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from metainfer.arch.cache_kinds import BLOCK_TOKENS, CacheKind, Scope, cache_kinds
from metainfer.arch.families import read_arch
from metainfer.arch.manifest import MTP_PREFIX, iterate, total_bytes
from metainfer.arch.tiny import tiny_arch, tiny_quantised_arch
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Gpu, Unknown
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import FP32_CACHES, CacheFormats
from metainfer.ops.capabilities import Capabilities
from metainfer.ops.catalogue import OPS
from metainfer.plan.build import CPU, build_plan, choose_target
from metainfer.plan.explain import explain
from metainfer.plan.graphs import context_sizes, row_sizes
from metainfer.plan.ledger import block_bytes, state_bytes, weights_bytes
from metainfer.plan.plan import Origin, Plan
from metainfer.plan.proof import CacheProof
from metainfer.plan.settings import EngineSettings
from tests.fakes.machines import GIB, make_machine

CARD = Gpu("NVIDIA RTX PRO 6000", (12, 0), 96 * GIB, 95 * GIB)
ABLE = Capabilities(
    target=CPU,
    backends=dict.fromkeys(OPS, ("cpu", "cpu_expanded", "reference")),
    default_order=("cpu", "reference"),
    expanding=frozenset({"cpu_expanded"}),
)
FLASH = read_arch("deepseek-v4-flash")


def on(target: Target, *, without: tuple[str, ...] = ()) -> Capabilities:
    """Kernels for all operations but some on `target`."""
    backends = {op: () if op in without else ("triton",) for op in OPS}
    return Capabilities(target, backends, ("triton",), frozenset())


def plan(machine=None, arch=None, able=ABLE, **flags) -> Plan:
    return build_plan(
        machine or make_machine(), arch or tiny_quantised_arch(), EngineSettings(**flags), able
    )


def refusal(*arguments, **flags) -> str:
    with pytest.raises(UserError) as caught:
        plan(*arguments, **flags)
    assert caught.value.hint
    return f"{caught.value.message}; {caught.value.hint}"


def test_every_value_has_an_origin_and_a_reason_and_survives_json():
    made = plan()
    for _, value in made.items():
        assert isinstance(value.origin, Origin) and len(value.reason.split()) > 1
    assert Plan.from_json(made.to_json()) == made
    assert json.loads(made.to_json())["values"]["max_model_len"]["origin"] == "model"


@pytest.mark.parametrize("value", [5, None, {}, {"value": 1, "origin": "rumour", "reason": "so"}])
def test_a_plan_whose_values_are_none_is_refused(value):
    record = json.loads(plan().to_json())
    record["values"]["max_num_seqs"] = value
    with pytest.raises(UserError, match="the plan's max_num_seqs is no value with its origin"):
        Plan.from_json(json.dumps(record))


@pytest.mark.parametrize(
    ("flag", "given", "field", "value"),
    [
        ("dtype", "float32", "compute_dtype", "float32"),
        ("kv_cache_dtype", "float32", "cache_dtype", "float32"),
        ("activations", "fp8", "activations", "fp8"),
        ("shared_expert_stream", "off", "shared_expert_stream", "off"),
        ("weights_residency", "expanded", "weights_residency", "expanded"),
        ("max_model_len", 300, "max_model_len", 300),
        ("max_num_seqs", 3, "max_num_seqs", 3),
        ("max_num_batched_tokens", 77, "max_num_batched_tokens", 77),
        ("max_queued_requests", 0, "max_queued_requests", 0),
        ("num_blocks_override", 32, "num_blocks", 32),
        ("async_scheduling", True, "async_scheduling", "on"),
        ("async_scheduling", False, "async_scheduling", "off"),
        ("decode_share", 0.5, "decode_share", 0.5),
        ("longest_prefill_s", 1.5, "longest_prefill_s", 1.5),
        ("threads", 5, "threads", 5),
        ("tensor_parallel_size", 1, "tensor_parallel_size", 1),
        ("device", "cpu", "device", "cpu"),
    ],
)
def test_flags_win_and_say_so(flag, given, field, value):
    chosen = getattr(plan(**{flag: given}), field)
    assert (chosen.value, chosen.origin) == (value, Origin.FLAG)
    assert "--" in chosen.reason


def test_the_shared_expert_has_a_stream_always_never_or_by_rows():
    able = Capabilities(
        Target("cuda", (9, 0)), dict.fromkeys(OPS, ("triton",)), ("triton",), frozenset()
    )
    machine = make_machine(gpus=(CARD,))
    for wanted in ("on", "off", "64"):
        chosen = plan(machine, able=able, shared_expert_stream=wanted).shared_expert_stream
        assert (chosen.value, chosen.origin) == (wanted, Origin.FLAG)
    assert plan().shared_expert_stream.value == "off"
    with pytest.raises(UserError, match="--shared-expert-stream 64: streams are a GPU's"):
        plan(shared_expert_stream="64")
    for wrong in ("0", "-1", "few"):
        with pytest.raises(UserError, match=f"--shared-expert-stream {wrong} is not on, off or"):
            EngineSettings(shared_expert_stream=wrong)


@pytest.mark.parametrize(
    ("flag", "given"),
    [("decode_share", 1.0), ("decode_share", -0.1), ("longest_prefill_s", 0.0)],
)
def test_times_that_cannot_be_are_refused(flag, given):
    with pytest.raises(UserError, match="--(decode-share|longest-prefill)"):
        EngineSettings(**{flag: given})


def test_a_gpu_is_given_steps_ahead_and_a_cpu_gains_nothing_by_it():
    assert plan().async_scheduling.value == "off"
    able = Capabilities(
        Target("cuda", (12, 0)), dict.fromkeys(OPS, ("triton",)), ("triton",), frozenset()
    )
    assert plan(make_machine(gpus=(CARD,)), able=able).async_scheduling.value == "on"


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [
        (("avx2", "avx512_bf16"), "bfloat16"),
        (("amx_bf16",), "bfloat16"),
        (("avx2", "avx512f"), "float32"),
        (Unknown("no flags"), "float32"),
    ],
)
def test_the_format_of_products_follows_the_cpu(isa, dtype):
    made = plan(make_machine(isa=isa))
    assert made.compute_dtype.value == made.cache_dtype.value == dtype
    assert made.threads.value == 8
    assert plan(make_machine(isa=isa), tiny_arch()).compute_dtype.value == "float32"


def test_expanded_weights_name_their_kernels():
    assert plan().kernel_order.value == ""
    assert plan(weights_residency="expanded").kernel_order.value == "*=cpu_expanded,cpu,reference"
    without = replace(ABLE, expanding=frozenset())
    assert "expanded weights" in refusal(able=without, weights_residency="expanded")


def test_a_reference_on_an_accelerator_is_allowed_in_words():
    slow = ("moe.route_learned", "moe.experts_fp8_rows")
    with_references = {op: ("reference",) if op in slow else ("triton", "reference") for op in OPS}
    able = Capabilities(Target("cuda", (12, 0)), with_references, ("triton",), frozenset())
    machine = make_machine(gpus=(CARD,))
    assert "--kernel-order" in refusal(machine, able=able, device="cuda")
    allowed = plan(machine, able=able, device="cuda", kernel_order="*=triton,reference")
    assert allowed.device.value == "cuda:0"
    assert "moe.experts_fp8_rows, moe.route_learned" in allowed.kernel_order.reason
    assert "unknown backend fast" in refusal(kernel_order="*=fast")
    assert "both choose" in refusal(weights_residency="expanded", kernel_order="*=cpu")


# ---- the ledger ----


def test_weights_are_counted_as_they_are_kept():
    stored = sum(spec.nbytes for spec in iterate(FLASH) if not spec.name.startswith(MTP_PREFIX))
    kept = weights_bytes(FLASH, "quantised", "bfloat16")
    assert stored <= kept < 1.01 * stored < total_bytes(FLASH) * 1.01
    # 284 billion parameters at 2 bytes each.
    assert weights_bytes(FLASH, "expanded", "bfloat16") == pytest.approx(568e9, rel=0.01)
    plain = tiny_arch()
    assert weights_bytes(plain, "quantised", "float32") == total_bytes(plain)


BF16, FP32 = CacheFormats("bfloat16", "bfloat16"), FP32_CACHES


def per_block(kind: CacheKind, caches: CacheFormats) -> int:
    return kind.rows_per_block * caches.row_bytes(kind)


def test_state_and_blocks_are_the_sums_of_the_cache_kinds():
    for arch in (FLASH, tiny_arch()):
        rings = [k for k in cache_kinds(arch, 3) if k.scope is Scope.SEQUENCE]
        assert state_bytes(arch, 5, BF16, 3) == 5 * sum(per_block(k, BF16) for k in rings)
        paged = [k for k in cache_kinds(arch) if k.scope is Scope.TOKENS]
        assert block_bytes(arch, FP32) == sum(per_block(k, FP32) for k in paged)


@hypothesis_settings(deadline=None, max_examples=60)
@given(
    available=st.integers(200 * 2**20, 1200 * 2**20),
    share=st.floats(0.5, 1.0),
    max_model_len=st.none() | st.integers(128, 4096),
    max_num_seqs=st.none() | st.integers(1, 200),
)
def test_what_is_planned_fits_or_is_refused(available, share, max_model_len, max_num_seqs):
    machine, arch = make_machine(available=available), tiny_quantised_arch()
    try:
        made = plan(
            machine,
            arch,
            memory_utilization=share,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
        )
    except UserError as error:
        assert "does not fit" in error.message
        return
    total = sum(v.value for name, v in made.items() if name.endswith("_bytes"))
    assert total <= available * share
    longest = -(-made.max_model_len.value // BLOCK_TOKENS)
    assert longest <= made.num_blocks.value <= made.max_num_seqs.value * longest
    assert made.blocks_bytes.value == made.num_blocks.value * block_bytes(arch, BF16)


def test_blocks_stop_where_they_would_be_of_no_use():
    made = plan(max_model_len=1000, max_num_seqs=3)
    assert made.num_blocks.value == 3 * 8
    assert "could use" in made.num_blocks.reason


def test_less_memory_means_fewer_blocks_then_sequences_then_a_shorter_context():
    roomy = plan(make_machine(available=1024 * GIB), FLASH)
    seen = []
    for available in (300, 204, 195, 188, 185, 184):
        made = plan(make_machine(available=available * GIB), FLASH)
        seen.append((made.max_model_len.value, made.max_num_seqs.value, made.num_blocks.value))
    assert seen == sorted(seen, reverse=True)
    lengths, seqs, blocks = zip(*seen, strict=True)
    assert lengths[0] == FLASH.max_model_len and blocks[0] < roomy.num_blocks.value
    assert lengths[-1] < FLASH.max_model_len and seqs[-1] < 64
    assert made.max_model_len.origin is Origin.MEASURED and "GB" in made.max_model_len.reason


def test_a_cgroup_s_limit_is_what_counts():
    free = plan(make_machine(available=300 * GIB), FLASH)
    assert free.num_blocks.value > 0
    assert "does not fit" in refusal(make_machine(available=100 * GIB, limit=100 * GIB), FLASH)


# ---- graphs ----


def test_sizes_of_graphs_are_read_as_vllm_does():
    assert row_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert row_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert row_sizes(1) == (1,)
    assert row_sizes(64, (16,)) == (1, 2, 4, 8, 16)
    assert row_sizes(64, (12, 3, 3)) == (3, 12)
    assert row_sizes(8, (4, 100)) == (4, 8)
    assert context_sizes(300) == (300,)
    assert context_sizes(8192) == (2048, 4096, 8192)
    assert context_sizes(9000) == (2048, 4096, 8192, 9000)


def test_graphs_are_planned_on_a_gpu_and_paid_for():
    gpu, able = make_machine(gpus=(CARD,)), on(Target("cuda", (12, 0)))
    made = plan(gpu, able=able, max_num_seqs=8)
    assert made.cuda_graphs.value == "on"
    assert made.cuda_graph_sizes.value == (1, 2, 4, 8)
    assert made.cuda_graph_contexts.value == (2048, 4096)
    assert Plan.from_json(made.to_json()) == made
    eager = plan(gpu, able=able, max_num_seqs=8, enforce_eager=True)
    assert eager.cuda_graphs.value == "off" and eager.cuda_graphs.origin is Origin.FLAG
    assert eager.cuda_graph_sizes == made.cuda_graph_sizes, "the same shapes, the same bits"
    assert 0 < eager.graphs_bytes.value < made.graphs_bytes.value
    few = plan(gpu, able=able, max_num_seqs=8, cuda_graph_sizes=(3, 5))
    assert few.cuda_graph_sizes.value == (3, 5)
    assert few.graphs_bytes.value < made.graphs_bytes.value
    total = sum(v.value for name, v in made.items() if name.endswith("_bytes"))
    assert total <= 0.9 * CARD.free_bytes


def test_a_cpu_has_no_graphs():
    made = plan(enforce_eager=True)
    assert (made.cuda_graphs.value, made.cuda_graph_sizes.value) == ("off", ())
    assert made.graphs_bytes.value == 0
    assert "a GPU's" in refusal(cuda_graph_sizes=(4,))


# ---- refusals ----


def test_what_does_not_fit_says_how_much_and_what_to_change():
    said = refusal(make_machine(available=64 * GIB), FLASH)
    assert "deepseek-v4-flash does not fit" in said and "weights 156.7 GB" in said
    assert "--memory-utilization" in said and "--max-model-len" not in said.split("; ")[-1]
    said = refusal(
        make_machine(available=200 * GIB), FLASH, max_model_len=1_000_000, max_num_seqs=64
    )
    assert "a shorter --max-model-len, fewer --max-num-seqs" in said
    assert "0.1% of the" in refusal(memory_utilization=0.001)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"max_model_len": 5000}, "--max-model-len 5000 is more than the 4096 tokens"),
        ({"tensor_parallel_size": 3}, "attention heads: 4 is not a multiple of 3"),
        (
            {"tensor_parallel_size": 2, "prefill_context_parallel_size": 4},
            "--prefill-context-parallel-size 4 does not divide the 2 ranks",
        ),
        ({"num_blocks_override": 9, "memory_utilization": 0.5}, "both set the size of the cache"),
        ({"num_blocks_override": 9, "max_model_len": 2000}, "at least --num-blocks 16"),
        ({"num_blocks_override": 10**14}, "and there are 34.4 GB in all"),
        ({"num_blocks_override": 32, "max_num_seqs": 10**12}, "and there are 34.4 GB in all"),
        ({"cuda_graph_sizes": (8,), "enforce_eager": True}, "contradict each other"),
        ({"threads": 10**11}, "--threads 100000000000 is more than the 16"),
    ],
)
def test_contradictions_are_refused(flags, sentence):
    assert sentence in refusal(**flags)


def test_blocks_that_are_given_bound_the_context_that_is_not():
    made = plan(make_machine(available=Unknown("no /proc")), num_blocks_override=9)
    assert (made.max_model_len.value, made.num_blocks.value) == (9 * BLOCK_TOKENS, 9)
    assert "--num-blocks" in refusal(make_machine(available=Unknown("no /proc")))


def test_a_plan_says_where_its_context_is_much_longer_than_what_was_judged():
    seen = CacheProof("fp8", "fp8", "it was seen", 64)
    arch = read_arch("pebble")
    for length, told in ((128, "it was seen"), (256, "it was seen; judged on prompts of up to 64")):
        settings = EngineSettings(max_model_len=length)
        made = build_plan(make_machine(), arch, settings, ABLE, seen)
        assert made.cache_dtype.value == "fp8"
        assert made.cache_dtype.reason.startswith(told)
        assert ("judged on" in made.index_cache_dtype.reason) is (length == 256)


def test_a_device_without_kernels_is_refused_with_their_names():
    gpu = make_machine(gpus=(CARD,))
    lacking = on(Target("cuda", (12, 0)), without=("moe.experts_fp8_rows", "norm.rms_norm"))
    said = refusal(gpu, able=lacking, device="cuda")
    assert "cuda:sm_120 has no kernels for 2 of the" in said and "moe.experts_fp8_rows" in said
    made = plan(gpu, able=on(Target("cuda", (12, 0))), device="cuda")
    assert (made.device.value, made.threads.value) == ("cuda:0", 0)


def test_the_device_is_the_first_gpu_on_which_everything_runs():
    new, old = CARD, replace(CARD, capability=(8, 0))

    def able(target: Target) -> Capabilities:
        return (
            ABLE
            if target == CPU
            else on(target, without=("norm.rms_norm",) * (target.capability == (8, 0)))
        )

    def chosen(gpus, **flags) -> str:
        machine, settings = make_machine(gpus=gpus), EngineSettings(**flags)
        return str(choose_target(machine, tiny_quantised_arch(), settings, able).target)

    assert chosen((old, new)) == chosen((old, new), device="cuda") == "cuda:sm_120"
    both = make_machine(gpus=(replace(old, free_bytes=GIB // 4), new))
    made = plan(both, able=able(Target("cuda", (12, 0))))
    assert made.device.value == "cuda:1"
    assert made.num_blocks.value == plan(make_machine(gpus=(new,))).num_blocks.value
    assert chosen((old,)) == chosen((new,), device="cpu") == chosen(()) == "cpu"
    assert chosen((old,), device="cuda") == "cuda:sm_80"  # and build_plan says what it lacks
    assert "lacks kernels" in plan(make_machine(gpus=(old,))).device.reason
    for number, kind in enumerate(("80", "120")):
        assert chosen((old, new), device=f"cuda:{number}") == f"cuda:sm_{kind}"
    twins = make_machine(gpus=(replace(new, free_bytes=GIB // 4), new))
    made = plan(twins, able=able(Target("cuda", (12, 0))), device="cuda:1")
    assert (made.device.value, made.device.origin) == ("cuda:1", Origin.FLAG)
    assert made.num_blocks.value == plan(make_machine(gpus=(new,))).num_blocks.value
    with pytest.raises(UserError, match="--device cuda:2: there are 2 GPUs"):
        chosen((old, new), device="cuda:2")
    for gpus in (Unknown("no driver"), ()):
        with pytest.raises(UserError, match="--device cuda asks for a GPU"):
            chosen(gpus, device="cuda")


# ---- explain ----


def test_the_table_is_aligned_and_complete():
    made = plan(max_model_len=1024)
    table = explain(made).splitlines()
    column = table[0].index("reason")
    lines, reasons = [], []
    for line in table:
        assert len(line) <= 100 and line[column - 1 : column] in (" ", "")
        if line.startswith(" "):  # a reason goes on
            reasons[-1] += " " + line.strip()
        else:
            lines.append(line)
            reasons.append(line[column:])
    assert reasons[1:-1] == [value.reason for _, value in made.items()]
    for line, (name, _) in zip(lines[1:-1], made.items(), strict=True):
        assert line.startswith(name)
    assert any(line.split()[:3] == ["max_model_len", "1,024", "flag"] for line in lines)
    assert lines[-1].startswith("memory in all")
