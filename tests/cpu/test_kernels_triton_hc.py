"""Hyper-connections in Triton where the generic test does not look: the path of many rows, and how
exact the two bf16 parts of fn are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metainfer.kernels.inputs import hc as inputs
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.reference import hc as reference
from metainfer.kernels.reference.norm import rms_norm
from metainfer.kernels.triton import hc
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.ops.hc import HyperCase
from metainfer.ops.norm import RmsNormCase

LAUNCH = JitLauncher((9, 0), 4)
BF16 = HyperCase(4, 64)
FP32 = HyperCase(2, 40, iterations=3, stream_dtype="float32", dtype="float32")
WIDE = HyperCase(4, 300, iterations=3)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 65, 700, 8192])
@pytest.mark.parametrize(("channels", "step"), [(16384, 128), (5120, 32), (80, 32), (96, 64)])
def test_slices_cover_all_channels_and_none_is_empty(rows: int, channels: int, step: int) -> None:
    tiles = hc.tiles_of(rows, channels, step, 128)
    assert (tiles.splits - 1) * tiles.slice < channels <= tiles.splits * tiles.slice
    assert tiles.slice % tiles.channels == 0
    assert tiles.even == (tiles.splits * tiles.slice == channels)


def test_two_bf16_parts_of_fn_are_as_good_as_fp32() -> None:
    """2^-18 of a weight is lost at most, and the mixes are within 1e-5 of float64."""
    case = HyperCase(4, 1024)
    call = inputs.mix(case, Draw(5), 7)
    fn_MK, base_M, scale_3 = call.weights
    mixes = hc.prepare_mix(case, fn_MK, base_M, scale_3)
    counts = torch.tensor([4, 4, 16])
    scaled_MK = fn_MK * scale_3.repeat_interleave(counts).unsqueeze(1)
    lost_MK = mixes.parts_PMK.double().sum(0) - scaled_MK.double()
    assert (lost_MK.abs() <= scaled_MK.double().abs() * 2.0**-17).all()

    wide = tuple(weight.double() for weight in call.weights)
    streams_TSD = call.arguments[0].double()
    z_TK = streams_TSD.flatten(1)
    z_TK = z_TK * (z_TK.square().mean(1, keepdim=True) + case.norm_eps).rsqrt()
    m_TM = z_TK @ wide[0].T * wide[2].repeat_interleave(counts) + wide[1]
    _, post_TS, _ = hc.mix(LAUNCH, case, mixes, *call.arguments)
    error = (post_TS.double() - 2 * m_TM[:, 4:8].sigmoid()).abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("normed", [False, True])
def test_the_shifted_mix_given_its_own_weights_is_the_plain_mix(normed: bool) -> None:
    case = replace(FP32, normed=normed)
    call = inputs.mix_norm(case, Draw(6), 5)
    streams_TSD = call.arguments[0]
    nothing_TS = torch.zeros(5, case.streams)
    _, pre_TS, *_ = reference.mix_shifted(case, call.weights, streams_TSD, nothing_TS)
    u_TD, again_TS, post_TS, comb_TSS = reference.mix_shifted(
        case, call.weights, streams_TSD, pre_TS
    )
    weights = call.weights if normed else call.weights[:3]
    plain = (reference.mix_norm if normed else reference.mix)(case, weights, streams_TSD)
    assert torch.equal(again_TS, pre_TS)
    for ours, theirs in zip((u_TD, post_TS, comb_TSS), plain, strict=True):
        assert torch.equal(ours, theirs)
    alone_TD = reference.collapse(case, call.weights[3:], streams_TSD, pre_TS)
    assert torch.equal(alone_TD, u_TD)


def test_the_normed_mix_is_the_mix_and_then_the_norm() -> None:
    call = inputs.mix_norm(BF16, Draw(6), 5)
    x_TD = reference.mix_norm(BF16, call.weights, *call.arguments)[0]
    u_TD = reference.mix(BF16, call.weights[:3], *call.arguments)[0]
    norm = RmsNormCase(BF16.width, BF16.norm_eps)
    assert torch.equal(x_TD, rms_norm(norm, u_TD, call.weights[3]))
