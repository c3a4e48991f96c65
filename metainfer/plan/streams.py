"""Streams: what runs beside a step's kernels on a GPU."""

from __future__ import annotations

from metainfer.core.errors import UserError
from metainfer.ops.base import Target
from metainfer.plan.plan import Origin, Value
from metainfer.plan.settings import EngineSettings


def shared_expert_stream(settings: EngineSettings, target: Target) -> Value[str]:
    given = settings.shared_expert_stream
    if given not in (None, "off") and target.type != "cuda":
        raise UserError(
            f"--shared-expert-stream {given}: streams are a GPU's, and this runs on the CPU",
            hint="leave it out",
        )
    if given is not None:
        return Value(given, Origin.FLAG, "given with --shared-expert-stream")
    if target.type == "cuda":
        return Value("on", Origin.DEFAULT, "neither kind of expert fills the GPU to its end")
    return Value("off", Origin.DEFAULT, "a CPU has no streams")
