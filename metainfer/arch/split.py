"""Split: which tensors the ranks of a tensor-parallel group divide, and along which dimension.

Query heads, output groups, expert width and vocabulary rows of the head are divided; the latent,
compressors, indexer, routers, hyper-connections and norms are on every rank. Where experts are
dealt out, a rank has some of them, whole or divided over fewer ranks. A weight and its scales are
always divided alike: a rank's part is whole blocks of scales, or lies within one block, whose
scale several ranks have then. `check_split` refuses all else.
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

# Of these, what ranks with the same heads have alike.
_OF_HEADS = re.compile(r"layers\.\d+\.(attn|ffn\.shared_experts)\..*")
_OF_EXPERTS = re.compile(r"layers\.\d+\.ffn\.experts\.(\d+)\..*")


def split_dimension(name: str) -> int | None:
    """The dimension of the tensor `name` that ranks divide evenly; None where each has it all."""
    for pattern, dimension in _TABLE:
        if pattern.fullmatch(name):
            return dimension
    return None


def rank_share(whole: int, rank: int, size: int) -> tuple[int, int]:
    """(first, how many) of `whole` rows or columns that a rank has. Of scales that are fewer than
    ranks it has the one whose block holds its part."""
    return whole * rank // size, max(1, whole // size)


def division(name: str, rank: int, size: int, context: int = 1, expert: int = 1) -> tuple[int, int]:
    """(which, of how many) parts of the tensor `name` a rank has.

    Args:
        context: ranks that follow each other and have the same heads, where prefill is sharded over
            tokens. Experts and the head are divided over all ranks.
        expert: parts of the ranks over which experts are dealt, see `own_experts`. The ranks of a
            part divide the width of its experts.
    """
    if split_dimension(name) is None:
        return 0, 1
    if context > 1 and _OF_HEADS.fullmatch(name):
        return rank // context, size // context
    if expert > 1 and _OF_EXPERTS.fullmatch(name):
        return rank % (size // expert), size // expert
    return rank, size


def own_experts(count: int, rank: int, size: int, expert: int = 1) -> range:
    """Of `count` experts those that a rank has, whole or a slice of each: the ranks that follow
    each other in one of `expert` parts have the same."""
    part = rank // (size // expert)
    return range(count * part // expert, count * (part + 1) // expert)


def expert_of(name: str) -> int | None:
    """Which routed expert the tensor `name` is of; None for others."""
    found = _OF_EXPERTS.fullmatch(name)
    return None if found is None else int(found[1])


def rank_shape(
    name: str, shape: tuple[int, ...], size: int, context: int = 1, expert: int = 1
) -> tuple[int, ...]:
    """Shape of one rank's slice. `size` and `expert` must have passed `check_split`."""
    dimension = split_dimension(name)
    _, size = division(name, 0, size, context, expert)
    if dimension is None or size == 1:
        return shape
    _, share = rank_share(shape[dimension], 0, size)
    return (*shape[:dimension], share, *shape[dimension + 1 :])


def check_split(arch: Arch, size: int, expert: int = 1) -> None:
    """Check that `size` ranks can divide the model without cutting a head, a group, a group of fp4
    codes, or a block of fp8 codes in other than equal parts.

    Args:
        expert: parts over which experts are dealt.

    Raises:
        UserError: with every number that does not divide.
    """
    if size % expert:
        raise UserError(
            f"experts cannot be dealt over {expert} parts of {size} ranks",
            hint=f"give a divisor of {size} with --expert-parallel-size, or leave it out",
        )
    if size == 1:
        return
    quantisation = arch.quantisation
    blocks = quantisation.fp8_block
    width = arch.moe_intermediate_size
    # (what, whole, lengths of blocks that it is cut into, whether a part may lie within a block)
    demands: list[tuple[str, int, tuple[int, ...], bool]] = [
        ("attention heads", arch.num_heads, (), False),
        ("output groups", arch.o_groups, (), False),
        ("vocabulary rows", arch.vocab_size, (), False),
    ]
    if quantisation.linear is WeightFormat.FP8_BLOCK:
        low_ranks = arch.o_groups * arch.o_lora_rank
        demands.append(("rows of wq_b", arch.num_heads * arch.head_dim, blocks[:1], True))
        demands.append(("rows of wo_a, columns of wo_b", low_ranks, blocks, True))
        demands.append(("width of the shared expert", width, blocks, True))
    parts, may_cut = {
        WeightFormat.FP8_BLOCK: (blocks, True),
        WeightFormat.FP4_GROUP: ((quantisation.fp4_group,), False),
    }.get(quantisation.experts, ((), False))
    refused = _refused(demands, size)
    slices = size // expert
    refused += _refused([("width of the routed experts", width, parts, may_cut)], slices)
    refused += _refused([("routed experts", arch.num_experts, (), False)], expert)
    if refused:
        raise UserError(
            f"{arch.name} cannot be divided over {size} ranks: " + "; ".join(refused),
            hint="choose another --tensor-parallel-size"
            + (" or --expert-parallel-size" if expert > 1 else ""),
        )


def _refused(demands: list[tuple[str, int, tuple[int, ...], bool]], size: int) -> list[str]:
    """What of `demands` cannot be divided over `size` ranks, and why."""
    refused = []
    for what, whole, parts, may_cut in demands:
        if whole % size:
            refused.append(f"{what}: {whole} is not a multiple of {size}")
            continue
        share = whole // size
        odd = [part for part in parts if not _stands_alone(whole, share, part, may_cut)]
        if odd and size > 1:
            but = " nor an even part" if may_cut else ""
            refused.append(f"{what}: {whole} / {size} = {share} is not a multiple of {odd[0]}{but}")
    return refused


def _stands_alone(whole: int, share: int, block: int, may_cut: bool) -> bool:
    """Whether a share of `whole` is whole blocks or, where that may be, lies within one."""
    return share % block == 0 or (may_cut and whole % block == 0 and block % share == 0)
