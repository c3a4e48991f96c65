"""Every operation that a rank of a model runs: what coverage, verification and benchmarks go by."""

from __future__ import annotations

from pathlib import Path

from metainfer.arch.attention_sides import ATTENTION_ONLY
from metainfer.arch.families import read_arch, read_attention
from metainfer.core.errors import UserError
from metainfer.ops.cache_formats import cache_formats
from metainfer.ops.sample import OPS as SAMPLING
from metainfer.ops.sample import SampleCase
from metainfer.ops.use import DECODE, PARTS, Use, Uses, merged
from metainfer.ops.uses_attention import attention_uses
from metainfer.ops.uses_v4 import is_quantised, served_uses


def uses_of(
    path_or_name: str | Path,
    ranks: int,
    part: str = "",
    dtype: str = "bfloat16",
    activations: str = "plain",
    latents: str = "",
    index_keys: str = "",
    expert: int = 1,
    context: int = 1,
    kv_shards: int = 1,
) -> tuple[Use, ...]:
    """Uses of one of `ranks` ranks of a model: those that its layers bind first, then other forms.

    Args:
        path_or_name: as `arch.families.read_attention` takes it.
        part: one of `PARTS`, or "" for all that is known of the model.
        dtype: of activations and of residual streams.
        activations: as of `served_uses`.
        latents, index_keys: formats of caches as a plan calls them (`ops.cache_formats`); "" for
            plain numbers.
        expert: parts of the ranks over which experts are dealt.
        context, kv_shards: of the ranks, as of `served_uses`; of what layers bind alone.

    Raises:
        UserError, CheckpointError: there is no such model or part, `ranks` does not divide it, or
            it has no layers here that could share tokens or caches.
    """
    if part and part not in PARTS:
        raise UserError(f"'{part}' is no part of a model", hint="parts: " + ", ".join(PARTS))
    side = read_attention(path_or_name)
    served: tuple[Use, ...] = ()
    if side.family in ATTENTION_ONLY and max(context, kv_shards) > 1:
        raise UserError(
            f"of {side.name} the attention kernels alone are here, and no layers that share tokens"
            " of prefills or caches",
            hint="leave --prefill-context-parallel-size and --decode-context-parallel-size out",
        )
    if side.family not in ATTENTION_ONLY:
        arch = read_arch(path_or_name)
        served = (
            *served_uses(
                arch,
                ranks,
                dtype,
                dtype,
                activations,
                cache_formats(arch, latents or dtype, index_keys or dtype),
                expert=expert,
                kv_shards=kv_shards,
                context=context,
            ),
            *sampling_uses(arch.vocab_size),
        )
    uses = merged(served, attention_uses(side, ranks, dtype))
    return tuple(use for use in uses if not part or use.part == part)


def usual_activations(path_or_name: str | Path, device_type: str) -> str:
    """`activations` of `uses_of` as layers bind them on "cpu" or "cuda" where no flag says
    otherwise: on a GPU rows of quantised matrices are rounded."""
    if device_type != "cuda" or read_attention(path_or_name).family in ATTENTION_ONLY:
        return "plain"
    return "fp8" if is_quantised(read_arch(path_or_name)) else "plain"


def sampling_uses(vocab: int) -> tuple[Use, ...]:
    """What `llm.sample` binds. It samples a row of each sequence, so that there are few rows."""
    uses = Uses(served=True)
    for op in SAMPLING:
        uses.add(op.name, SampleCase(vocab), (DECODE,))
    return uses.all()
