"""The references against a second formulation: loops, tables and complex numbers in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from metainfer.kernels.reference.dequantise import fp4_group, fp8_block, scales_to_float
from tests.fakes.op_inputs import Call, make
from tests.fakes.reference_checks import cases, near, reference, turned


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(nibble: int) -> float:
    sign, exponent, mantissa = -1.0 if nibble & 8 else 1.0, nibble >> 1 & 3, nibble & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_fp8_values_and_blocks() -> None:
    codes = torch.tensor([[b for b in range(256) if b & 127 != 127]], dtype=torch.uint8)
    scale = torch.tensor([[119, 130]], dtype=torch.uint8)
    weight = fp8_block(codes.view(torch.float8_e4m3fn), scale, (128, 128))
    expected = [
        e4m3(byte) * 2.0 ** ((119 if place < 128 else 130) - 127)
        for place, byte in enumerate(codes[0].tolist())
    ]
    assert weight[0].tolist() == expected
    tall = fp8_block(codes.view(torch.float8_e4m3fn).T, scale.T.float(), (128, 128))
    assert tall[127:129, 0].tolist() == [e4m3(128) * 119, e4m3(129) * 130]


def test_fp4_values_and_groups() -> None:
    packed = torch.arange(256).to(torch.uint8).view(1, -1)
    scale = torch.arange(120, 136).to(torch.uint8).view(1, -1)
    weight = fp4_group(packed, scale)
    expected = [
        e2m1(byte >> 4 * half & 15) * 2.0 ** (120 + (2 * byte + half) // 32 - 127)
        for byte in range(256)
        for half in (0, 1)
    ]
    assert weight[0].tolist() == expected


def test_e8m0_bytes() -> None:
    scales = scales_to_float(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert scales[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert scales[4].isnan()


@pytest.mark.parametrize("case", cases("norm.rms_norm"), ids=str)
def test_rms_norm(case: Any) -> None:
    call = make("norm.rms_norm", case, "7 rows")
    x_TD, weight_D = (t.double() for t in call.arguments)
    expected = torch.stack([x / math.sqrt(x @ x / case.width + case.eps) * weight_D for x in x_TD])
    near("norm.rms_norm", case, reference("norm.rms_norm", case, call), expected)


@pytest.mark.parametrize("case", cases("rope.rotate"), ids=str)
def test_rotate(case: Any) -> None:
    call = make("rope.rotate", case, "7 rows")
    expected = turned(case, *call.arguments)
    near("rope.rotate", case, reference("rope.rotate", case, call), expected)


@pytest.mark.parametrize("case", cases("rope.norm_rotate"), ids=str)
def test_norm_rotate(case: Any) -> None:
    call = make("rope.norm_rotate", case, "7 rows")
    x_THD, weight_D, rotation_TR2 = call.arguments
    norm = (x_THD.double().pow(2).sum(-1, keepdim=True) / case.width + case.eps).sqrt()
    normed = x_THD.double() / norm * (1 if weight_D is None else weight_D)
    expected = turned(case, normed, rotation_TR2)
    near("rope.norm_rotate", case, reference("rope.norm_rotate", case, call), expected)


@pytest.mark.parametrize("case", cases("linear.grouped"), ids=str)
def test_grouped(case: Any) -> None:
    call = make("linear.grouped", case, "2 rows")
    (x_TGI,) = call.arguments
    if case.weight_format == "fp8_block":
        weight = fp8_block(*call.weights, case.block)
    else:
        weight = call.weights[0]
    expected = torch.cat(
        [
            x_TGI[:, group].double()
            @ weight[group * case.rows : (group + 1) * case.rows].double().T
            for group in range(case.groups)
        ],
        dim=1,
    )
    near("linear.grouped", case, reference("linear.grouped", case, call), expected)


@pytest.mark.parametrize("variant", ["3 rows", "sharp"])
@pytest.mark.parametrize("case", cases("hc.mix"), ids=str)
def test_mix(case: Any, variant: str) -> None:
    call = make("hc.mix", case, variant)
    fn_MK, base_M, scale_3 = (w.double() for w in call.weights)
    u_TD, post_TS, comb_TSS = reference("hc.mix", case, call)
    streams = case.streams
    for row, stream_SD in enumerate(call.arguments[0].double()):
        flat = stream_SD.flatten()
        m = fn_MK @ (flat / math.sqrt(flat @ flat / len(flat) + case.norm_eps))
        pre = (m[:streams] * scale_3[0] + base_M[:streams]).sigmoid() + case.eps
        post = 2 * (m[streams : 2 * streams] * scale_3[1] + base_M[streams : 2 * streams]).sigmoid()
        comb = sinkhorn((m * scale_3[2] + base_M)[2 * streams :].tolist(), case)
        near("hc.mix", case, u_TD[row], pre @ stream_SD)
        near("hc.mix", case, post_TS[row], post)
        near("hc.mix", case, comb_TSS[row], torch.tensor(comb, dtype=torch.float64))


def sinkhorn(numbers: list[float], case: Any) -> list[list[float]]:
    """The contract's normalisation with plain numbers."""
    size = range(case.streams)
    comb = []
    for i in size:
        row = numbers[i * case.streams : (i + 1) * case.streams]
        powers = [math.exp(c - max(row)) for c in row]
        comb.append([power / sum(powers) + case.eps for power in powers])
    for step in range(2 * case.iterations - 1):
        if step % 2 == 0:
            sums = [sum(comb[i][j] for i in size) for j in size]
            comb = [[comb[i][j] / (sums[j] + case.eps) for j in size] for i in size]
        else:
            comb = [[c / (sum(row) + case.eps) for c in row] for row in comb]
    return comb


@pytest.mark.parametrize("case", cases("hc.expand"), ids=str)
def test_expand(case: Any) -> None:
    call = make("hc.expand", case, "7 rows")
    streams_TSD, y_TD, post_TS, comb_TSS = (t.double() for t in call.arguments)
    expected = torch.zeros_like(streams_TSD)
    for j in range(case.streams):
        expected[:, j] = post_TS[:, j, None] * y_TD
        for i in range(case.streams):
            expected[:, j] += comb_TSS[:, i, j, None] * streams_TSD[:, i]
    near("hc.expand", case, reference("hc.expand", case, call), expected)


@pytest.mark.parametrize("case", cases("hc.head"), ids=str)
def test_head(case: Any) -> None:
    call = make("hc.head", case, "7 rows")
    fn_SK, base_S, scale_1 = (w.double() for w in call.weights)
    rows = []
    for stream_SD in call.arguments[0].double():
        flat = stream_SD.flatten()
        m = fn_SK @ (flat / math.sqrt(flat @ flat / len(flat) + case.norm_eps))
        rows.append(((m * scale_1 + base_S).sigmoid() + case.eps) @ stream_SD)
    near("hc.head", case, reference("hc.head", case, call), torch.stack(rows))


@pytest.mark.parametrize("case", cases("moe.route_learned"), ids=str)
def test_routes(case: Any) -> None:
    call = make("moe.route_learned", case, "7 rows")
    (gate_ED, bias_E), (x_TD, _) = call.weights, call.arguments
    ids_TK, weights_TK = reference("moe.route_learned", case, call)
    logits_TE = x_TD.double() @ gate_ED.double().T
    scores_TE = (1 + logits_TE.exp()).log().sqrt()
    if case.score == "sigmoid":
        scores_TE = 1 / (1 + (-logits_TE).exp())
    for row, scores_E in enumerate(scores_TE):
        biased = kept_groups(case, (scores_E + bias_E).tolist())
        best = sorted(range(case.experts), key=lambda e, b=biased: -b[e])[: case.selected]
        assert sorted(ids_TK[row].tolist()) == sorted(best)
        weights_K = scores_E[ids_TK[row]] * case.scale
        if case.normalise:
            weights_K = weights_K / scores_E[ids_TK[row]].sum()
        near("moe.route_learned", case, weights_TK[row], weights_K)


def kept_groups(case: Any, biased: list[float]) -> list[float]:
    """-inf for experts of groups whose two best are worse than those of others."""
    size = case.experts // case.groups
    groups = [biased[at : at + size] for at in range(0, case.experts, size)]
    sums = [sum(sorted(group)[-2:]) for group in groups]
    worst = sorted(sums)[-case.group_topk]
    return [
        number if total >= worst else -math.inf
        for group, total in zip(groups, sums, strict=True)
        for number in group
    ]


@pytest.mark.parametrize("case", cases("moe.route_hash"), ids=str)
def test_hash_routes_are_the_learned_ones_with_the_table_for_the_choice(case: Any) -> None:
    call = make("moe.route_hash", case, "7 rows")
    (gate_ED, table_VK), (x_TD, token_ids_T, _) = call.weights, call.arguments
    ids_TK, weights_TK = reference("moe.route_hash", case, call)
    assert torch.equal(ids_TK, table_VK[token_ids_T])
    for row in range(len(x_TD)):
        bias_E = torch.zeros(case.experts).index_fill(0, ids_TK[row], 100.0)
        learned = Call((gate_ED, bias_E), (x_TD[row : row + 1],))
        ids_1K, weights_1K = reference("moe.route_learned", case, learned)
        by_id = dict(zip(ids_1K[0].tolist(), weights_1K[0].tolist(), strict=True))
        expected = torch.tensor([by_id[e] for e in ids_TK[row].tolist()])
        near("moe.route_hash", case, weights_TK[row], expected)


@pytest.mark.parametrize("variant", ["5 rows", "an expert twice", "empty rows"])
@pytest.mark.parametrize("case", cases("moe.experts"), ids=str)
def test_experts(case: Any, variant: str) -> None:
    call = make("moe.experts", case, variant)
    x_TD, ids_TK, weights_TK = call.arguments

    def weight(tensors: tuple[torch.Tensor, ...], expert: int) -> torch.Tensor:
        if case.weight_format == "fp8_block":
            return fp8_block(tensors[0][expert], tensors[1][expert], case.block).double()
        if case.weight_format == "fp4_group":
            return fp4_group(tensors[0][expert], tensors[1][expert]).double()
        return tensors[0][expert].double()

    expected = torch.zeros(x_TD.shape, dtype=torch.float64)
    for row, x_D in enumerate(x_TD.double()):
        for expert, share in zip(ids_TK[row].tolist(), weights_TK[row].double(), strict=True):
            if not 0 <= expert < case.experts:
                continue
            gate, up = (weight(call.weights[n], expert) @ x_D for n in (0, 2))
            gate, up = gate.clamp(max=case.limit), up.clamp(-case.limit, case.limit)
            expected[row] += share * (
                weight(call.weights[1], expert) @ (gate * gate.sigmoid() * up)
            )
    near("moe.experts", case, reference("moe.experts", case, call), expected)


def grouped_e4m3(case: Any, numbers: torch.Tensor) -> torch.Tensor:
    """float64 -> each group of channels rounded to e4m3 times a power of two."""
    groups = numbers.unflatten(-1, (-1, case.group))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2((amax / 448).log2().ceil())
    codes = (groups / scale).to(torch.float8_e4m3fn).double()
    return (codes * scale).flatten(-2)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    numbers = codes.view(torch.float8_e4m3fn).double().unflatten(1, (scales.shape[1], -1))
    return (numbers * scales_to_float(scales).double().unsqueeze(2)).flatten(1)


@pytest.mark.parametrize("variant", ["5 rows", "an expert twice", "empty rows", "rows apart"])
@pytest.mark.parametrize("case", cases("moe.experts_fp8_rows"), ids=str)
def test_experts_of_fp8_rows(case: Any, variant: str) -> None:
    """The same as experts of the decoded rows, with what is inside rounded."""
    call = make("moe.experts_fp8_rows", case, variant)
    codes_TD, scales_TG, ids_TK, weights_TK = call.arguments
    x_TD = decoded(codes_TD.contiguous(), scales_TG)
    expected = torch.zeros_like(x_TD)
    for row, x_D in enumerate(x_TD):
        for expert, share in zip(ids_TK[row].tolist(), weights_TK[row].double(), strict=True):
            if not 0 <= expert < case.experts:
                continue
            w1, w2, w3 = (
                fp4_group(part[expert], scale[expert]).double()
                if case.weight_format == "fp4_group"
                else fp8_block(part[expert], scale[expert], case.block).double()
                for part, scale in call.weights
            )
            gate, up = (w1 @ x_D).clamp(max=case.limit), (w3 @ x_D).clamp(-case.limit, case.limit)
            inside = (gate * gate.sigmoid() * up).bfloat16().double()
            expected[row] += share * (w2 @ grouped_e4m3(case, inside))
    near("moe.experts_fp8_rows", case, reference("moe.experts_fp8_rows", case, call), expected)


@pytest.mark.parametrize("case", cases("moe.swiglu_fp8"), ids=str)
def test_swiglu_fp8(case: Any) -> None:
    call = make("moe.swiglu_fp8", case, "7 rows")
    gate, up = call.arguments[0].double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=case.limit), up.clamp(-case.limit, case.limit)
    exact = gate * gate.sigmoid() * up
    ours = decoded(*reference("moe.swiglu_fp8", case, call))
    assert (ours - exact).abs().max() <= exact.abs().max() / 16
    rounded = exact.bfloat16().double() if case.dtype == "bfloat16" else exact
    assert (ours != grouped_e4m3(case, rounded)).double().mean() < 0.01


@pytest.mark.parametrize("case", cases("moe.swiglu"), ids=str)
def test_swiglu(case: Any) -> None:
    call = make("moe.swiglu", case, "7 rows")
    gate, up = call.arguments[0].double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=case.limit), up.clamp(-case.limit, case.limit)
    near("moe.swiglu", case, reference("moe.swiglu", case, call), gate * gate.sigmoid() * up)
