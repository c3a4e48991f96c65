"""What a rank sends in a prefill step of V4-Flash, by heads and shared over tokens, on paper."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from metainfer.arch.families import read_arch
from metainfer.arch.record import LayerKind
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.nn.cache import CacheStorage
from metainfer.nn.inputs import StepInputs
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import cache_formats
from metainfer.weights.shapes import ShapesOnly
from tests.fakes.counted import Counted

ROWS, BEFORE, RANKS = 8192, 8192, 8
META = torch.device("meta")


def sent_per_token(context: int, kinds: tuple[LayerKind, ...]) -> Counter[str]:
    """Bytes that a rank sends for each token and layer, with layers of these kinds alone."""
    arch = read_arch("deepseek-v4-flash")
    layers = [next(x for x in arch.layers if x.kind is kind) for kind in kinds]
    arch = replace(arch, layers=tuple(layers))
    group = Counted(0, RANKS)
    caches = cache_formats(arch, "fp8", "fp8")
    with torch.device("meta"), torch.inference_mode():
        model = DeepseekV4(
            arch,
            ShapesOnly(arch, RANKS, context),
            registry=builtin_registry(RecordingLauncher((12, 0), 188)),
            target=Target("cuda", (12, 0)),
            kernel_order="",
            group=group,
            context=context,
            device=META,
            compute_dtype=torch.bfloat16,
            activations="fp8",
            caches=caches,
        )
        blocks = (BEFORE + ROWS) // 128
        cache = CacheStorage(
            arch, num_slots=1, num_blocks=blocks, formats=caches, draft_rows=0, device=META
        )
        model.forward(_inputs(blocks), cache)
    return Counter({name: count / ROWS / len(layers) for name, count in group.sent.items()})


def _inputs(blocks: int) -> StepInputs:
    rows = torch.arange(ROWS)
    return StepInputs(
        token_ids_T=rows,
        positions_T=rows + BEFORE,
        sequence_T=torch.zeros(ROWS, dtype=torch.int64),
        row_starts=(0, ROWS),
        computed=(BEFORE,),
        slots=(0,),
        state_slots_B=torch.zeros(1, dtype=torch.int64),
        block_table_BM=torch.arange(blocks).unsqueeze(0),
        num_decode_sequences=0,
        logits_rows_R=torch.zeros(1, dtype=torch.int64),
        wanted_counts=(1,),
        wanted_rows_W=torch.tensor([ROWS - 1]),
    )


def test_tokens_send_a_fraction_of_what_heads_send() -> None:
    """Two kinds of layers in turn. Of the last one hardly any row is wanted, so that its sums are
    nearly nothing; all others send what research on PCIe counts: 28.7 KB by heads, 10.9 KB and at
    most 1.2 KB of latents, entries and keys by tokens."""
    kinds = (LayerKind.COMPRESSED_SPARSE, LayerKind.HEAVILY_COMPRESSED) * 4
    heads, tokens = sent_per_token(1, kinds), sent_per_token(RANKS, kinds)
    full = (len(kinds) - 1) / len(kinds)
    hidden_bytes = 2 * 4096
    assert heads.total() == pytest.approx(full * 2 * 2 * 7 / 8 * hidden_bytes, rel=0.01)
    assert tokens["reduce_scatter"] == pytest.approx(full * 7 / 8 * hidden_bytes, rel=0.01)
    codes_bytes = 4096 + 4096 // 128 + 6 * (8 + 4)  # codes, scales, ids and weights
    assert tokens["all_gather"] < full * 7 / 8 * codes_bytes + 1200
    assert heads.total() > 2.4 * tokens.total()
