"""Settings that are measured against each other: a stage by name, flags of the engine behind it.

No torch here.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from metainfer.arch.record import Arch
from metainfer.core.config import add_flags
from metainfer.core.errors import UserError
from metainfer.ops.kernel_order import COMPOSED, OPEN
from metainfer.ops.uses_v4 import served_uses
from metainfer.plan.settings import EngineSettings

_SPARE_TOKENS = 64
"""Room for what a sequence generates while another of its batch is still in prefill."""

GENERIC, ADAPTED, TUNED = "generic", "adapted", "tuned"
OPEN_STAGE = "open"

STAGES: Mapping[str, str] = MappingProxyType(
    {
        GENERIC: "compositions of torch's own operations in bf16, eager: what a framework falls"
        " back to",
        ADAPTED: "fast kernels, eager, nothing overlaps",
        TUNED: "what the plan chooses",
        OPEN_STAGE: "what the plan chooses, but open kernels that may be better",
    }
)
"""Name of each stage, and what it is."""

USUAL_STAGES = (GENERIC, ADAPTED, TUNED)
"""What is compared where nobody says otherwise."""

_OPEN_OPS = ("attention.sparse_prefill",)  # of `kernels.open`

_BETWEEN_FLAGS = re.compile(r",\s*(?=--)")


@dataclass(frozen=True, slots=True)
class Setting:
    """One side of a comparison. `name`: as it was written; `stage`: what it starts from."""

    name: str
    stage: str
    engine: EngineSettings

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "stage": self.stage, "engine": asdict(self.engine)}


def parse_setting(text: str, base: EngineSettings, arch: Arch) -> Setting:
    """ "tuned", "adapted,--max-num-batched-tokens=4096", "--threads 1" (of tuned).

    Args:
        base: the engine's flags that all sides share.

    Raises UserError naming the stage or flag that there is not.
    """
    try:
        words = shlex.split(_BETWEEN_FLAGS.sub(" ", text))
    except ValueError as error:
        raise UserError(f"the setting '{text}' cannot be read: {error}") from error
    if not words:
        raise UserError(
            "a setting is empty", hint=f"stages are {', '.join(STAGES)}; flags follow a comma"
        )
    stage = TUNED
    if words and not words[0].startswith("-"):
        stage, words = words[0], words[1:]
    if stage not in STAGES:
        raise UserError(
            f"'{stage}' is no stage", hint=f"stages are {', '.join(STAGES)}; flags follow a comma"
        )
    parser = _Parser(text)
    add_flags(parser, EngineSettings)
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(parser.parse_args(words)).items()
    }
    return Setting(text, stage, replace(base, **{**_of_stage(stage, arch), **given}))


def sized(settings: EngineSettings, arch: Arch, longest: int, sequences: int) -> EngineSettings:
    """`settings` with room for the work where no flag says how much: so many sequences, up to the
    longest and what they generate while others are in prefill. Raises UserError if the model was
    made for shorter ones."""
    if longest > arch.max_model_len:
        raise UserError(
            f"{longest} tokens are more than the {arch.max_model_len} that {arch.name} was made"
            " for",
            hint="give shorter lengths",
        )
    length = min(longest + _SPARE_TOKENS * sequences, arch.max_model_len)
    return replace(
        settings,
        max_model_len=settings.max_model_len or length,
        max_num_seqs=settings.max_num_seqs or sequences,
    )


def check_room(setting: Setting, longest: int, together: int) -> None:
    """Raises UserError where flags leave the engine of a setting less room than its work takes:
    sequences of up to `longest` tokens, so many `together`."""
    engine = setting.engine
    for name, room, needed, what in (
        ("--max-model-len", engine.max_model_len, longest, "tokens of the longest sequence"),
        ("--max-num-seqs", engine.max_num_seqs, together, "sequences that run together"),
    ):
        if room is not None and room < needed:
            raise UserError(
                f"{name} {room} is below the {needed} {what}",
                hint="leave it out, or give less work",
            )


def _of_stage(stage: str, arch: Arch) -> dict[str, Any]:
    """What the stage fixes of the engine."""
    if stage == TUNED:
        return {}
    if stage == OPEN_STAGE:
        # Nothing stands in for them: where one does not run, the reason is told.
        return {"kernel_order": ";".join(f"{op}={OPEN}" for op in _OPEN_OPS)}
    fixed: dict[str, Any] = {
        "enforce_eager": True,
        "shared_expert_stream": "off",
        "async_scheduling": False,
        "tuned_kernels": False,
    }
    if stage == GENERIC:
        # Operations that no layer binds, such as sampling, keep their own order.
        ops = dict.fromkeys(use.op for use in served_uses(arch, 1))
        fixed["activations"] = "plain"
        fixed["kernel_order"] = ";".join(f"{op}={COMPOSED}" for op in ops)
    return fixed


class _Parser(argparse.ArgumentParser):
    """argparse, but mistakes are UserErrors that name the setting."""

    def __init__(self, setting: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._setting = setting

    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"the setting '{self._setting}': {message}",
            hint="a setting is a stage, and flags of the engine as `serve` takes them",
        )
