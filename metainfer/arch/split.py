"""Split: which tensors the ranks of a tensor-parallel group divide, and along which dimension.

Query heads, output groups, expert width and vocabulary rows of the head are divided; the latent,
compressors, indexer, routers, hyper-connections and norms are on every rank. A weight and its
scales are always divided alike: `check_split` refuses sizes that would cut a block of scales.
"""

from __future__ import annotations

import re

from metainfer.arch.record import Arch, WeightFormat
from metainfer.core.errors import UserError

ROWS, COLUMNS = 0, 1

# Full names of tensors of the decoder layers and the head -> the dimension that is divided.
_TABLE: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), dimension)
    for pattern, dimension in (
        (r"layers\.\d+\.attn\.wq_b\.(weight|scale)", ROWS),  # heads
        (r"layers\.\d+\.attn\.attn_sink", ROWS),  # heads
        (r"layers\.\d+\.attn\.wo_a\.(weight|scale)", ROWS),  # output groups
        (r"layers\.\d+\.attn\.wo_b\.(weight|scale)", COLUMNS),  # output groups
        (r"layers\.\d+\.ffn\.(experts\.\d+|shared_experts)\.w[13]\.(weight|scale)", ROWS),
        (r"layers\.\d+\.ffn\.(experts\.\d+|shared_experts)\.w2\.(weight|scale)", COLUMNS),
        (r"head\.weight", ROWS),  # vocabulary
    )
)


def split_dimension(name: str) -> int | None:
    """The dimension of the tensor `name` that ranks divide evenly; None where each has it all."""
    for pattern, dimension in _TABLE:
        if pattern.fullmatch(name):
            return dimension
    return None


def rank_shape(name: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Shape of one rank's slice. `size` must have passed `check_split`."""
    dimension = split_dimension(name)
    if dimension is None or size == 1:
        return shape
    return (*shape[:dimension], shape[dimension] // size, *shape[dimension + 1 :])


def check_split(arch: Arch, size: int) -> None:
    """Check that `size` ranks can divide the model without cutting a head, a group, or a block of
    scales.

    Raises:
        UserError: with every number that does not divide.
    """
    if size == 1:
        return
    quantisation = arch.quantisation
    block_rows, block_columns = quantisation.fp8_block
    linear_is_fp8 = quantisation.linear is WeightFormat.FP8_BLOCK
    # (what, whole, smallest part that can stand alone)
    demands = [
        ("attention heads", arch.num_heads, 1),
        ("output groups", arch.o_groups, 1),
        ("vocabulary rows", arch.vocab_size, 1),
    ]
    if linear_is_fp8:
        rows = arch.num_heads * arch.head_dim
        demands.append(("rows of wq_b", rows, block_rows))
        demands.append(("columns of wo_b", arch.o_groups * arch.o_lora_rank, block_columns))
        part = max(block_rows, block_columns)
        demands.append(("width of the shared expert", arch.moe_intermediate_size, part))
    part = {
        WeightFormat.FP8_BLOCK: max(block_rows, block_columns),
        WeightFormat.FP4_GROUP: quantisation.fp4_group,
    }.get(quantisation.experts, 1)
    demands.append(("width of the routed experts", arch.moe_intermediate_size, part))

    refused = []
    for what, whole, part in demands:
        if whole % size:
            refused.append(f"{what}: {whole} is not a multiple of {size}")
        elif whole // size % part:
            share = whole // size
            refused.append(f"{what}: {whole} / {size} = {share} is not a multiple of {part}")
    if refused:
        raise UserError(
            f"{arch.name} cannot be divided over {size} ranks: " + "; ".join(refused),
            hint="choose a smaller --tensor-parallel-size",
        )
