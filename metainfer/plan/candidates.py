"""Candidates: which layouts a model can take at all, and the sentence why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from metainfer.arch.shapes import ModelShape
from metainfer.plan.cost.constants import Profile
from metainfer.plan.cost.shape import expert_part
from metainfer.plan.layouts import Layouts, layouts_of

_BLOCK = 128
"""Tokens that ranks deal out together."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A layout, and a sentence with the numbers why it is none.

    Attributes:
        missing_bytes: that the fullest GPU lacks, where memory is the reason.
    """

    name: str
    reason: str
    missing_bytes: int = 0


def candidates(
    shape: ModelShape, gpus: int, profile: Profile
) -> tuple[list[Layouts], list[Rejection]]:
    """Layouts that the model can take, with as many replicas as there is room for, and those that
    it cannot, one for each reason of their kind."""
    taken: list[Layouts] = []
    refused: dict[str, Rejection] = {}
    for layouts in _widest(gpus):
        reason = refusal(shape, layouts, profile)
        if not reason:
            taken.append(layouts)
        elif reason not in refused:
            refused[reason] = Rejection(layouts.name, reason)
    return taken, list(refused.values())


def _widest(gpus: int) -> Iterator[Layouts]:
    """Without those that leave out replicas for which there are GPUs."""
    for layouts in layouts_of(gpus):
        one = layouts.decode
        if one.replicas == gpus // (one.group * one.pipeline):
            yield layouts


def refusal(shape: ModelShape, layouts: Layouts, profile: Profile) -> str:
    """Why the model cannot take a layout; "" where it can."""
    return _undivided(shape, layouts) or _beyond(shape, layouts, profile)


def _undivided(shape: ModelShape, layouts: Layouts) -> str:
    """Which number its ranks do not divide."""
    one, side = layouts.decode, shape.side
    for what, whole in (
        ("attention heads", side.heads),
        ("output groups", side.output_groups),
        ("rows of the head", shape.vocab_size),
    ):
        if whole % one.tensor:
            each = _ratio(whole, one.tensor)
            return f"{whole:,} {what} / {one.tensor} ranks = {each}"
    if shape.experts % one.expert:
        return f"{shape.experts} experts do not divide by {one.expert}"
    slices, part = one.expert_slices, expert_part(shape)
    width = shape.expert_width
    if width % (slices * part):
        return (
            f"experts over {slices} ranks: {width} channels / {slices} ="
            f" {_ratio(width, slices)}, not a multiple of the {part} that share a scale"
        )
    return ""


def _beyond(shape: ModelShape, layouts: Layouts, profile: Profile) -> str:
    """What model or engine do not know."""
    before, one = layouts.prefill, layouts.decode
    if one.pipeline > shape.num_layers:
        return f"the model has {shape.num_layers} layers"
    if before.context > 1 and not profile.shards_tokens:
        return f"the engine ({profile.name}) does not divide prompts over ranks"
    if one.kv_shards > 1 and not shape.side.owners():
        return "the model keeps no entries that could be sharded"
    if one.kv_shards > 1 and not profile.shards_tokens:
        return f"the engine ({profile.name}) does not shard caches"
    return ""


def fits_chunk(layouts: Layouts, rows: int) -> bool:
    """Whether each rank gets a block of a chunk; a rank that shares no prompt takes any."""
    return layouts.prefill.context == 1 or rows >= _BLOCK * layouts.prefill.context


def _ratio(whole: int, parts: int) -> str:
    exact = whole / parts
    return f"{exact:g}" if exact == int(exact) else f"{exact:.1f}"
