"""Pace: when steps are made, and how time is shared between prompts and sequences that decode."""

from __future__ import annotations

from metainfer.plan.plan import Origin, Value
from metainfer.plan.settings import EngineSettings

_DECODE_SHARE = 0.25
_LONGEST_PREFILL_S = 0.25


def async_scheduling(device_name: str, settings: EngineSettings) -> Value[str]:
    """Whether a step is launched before the results of the one before are read: "on" or "off"."""
    if settings.async_scheduling is not None:
        given = settings.async_scheduling
        flag = "--async-scheduling" if given else "--no-async-scheduling"
        return Value("on" if given else "off", Origin.FLAG, f"given with {flag}")
    if device_name == "cuda":
        return Value("on", Origin.DEFAULT, "the GPU has work while the host reads results")
    return Value("off", Origin.DEFAULT, "on a CPU a step is done once it is launched")


def decode_share(settings: EngineSettings) -> Value[float]:
    """Share of the time for steps of decoding alone, while prompts wait."""
    if settings.decode_share is not None:
        return Value(settings.decode_share, Origin.FLAG, "given with --decode-share")
    reason = "prompts take a third longer at most, and tokens beside them come many times as often"
    return Value(_DECODE_SHARE, Origin.DEFAULT, reason)


def longest_prefill_s(settings: EngineSettings) -> Value[float]:
    """Seconds that a step with rows of prompts may take while others decode."""
    if settings.longest_prefill_s is not None:
        return Value(settings.longest_prefill_s, Origin.FLAG, "given with --longest-prefill")
    return Value(_LONGEST_PREFILL_S, Origin.DEFAULT, "readers hardly see a pause of that length")
