"""Workload: what a machine is planned for. Lengths in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metainfer.core.config import parse_count
from metainfer.core.errors import UserError

_KEYS = ("input", "output", "concurrency", "rate", "context")
_MOST_AT_ONCE = 2**16
_MOST_A_SECOND = 1e6
_EXAMPLE = "input=8192,output=512,concurrency=8"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are alike.

    Attributes:
        input_tokens, output_tokens: of one request; none of its input is in the prefix cache.
        requests_at_once: that are answered at the same time.
        request_rate_per_s: that arrive; None where a new one comes when one is done.
        longest_context: that must fit, input and output together; at least that of a request.
    """

    input_tokens: int = 8192
    output_tokens: int = 512
    requests_at_once: int = 8
    request_rate_per_s: float | None = None
    longest_context: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("input", self.input_tokens),
            ("output", self.output_tokens),
            ("concurrency", self.requests_at_once),
        ):
            if value < 1:
                raise UserError(f"the workload has {name}={value}, which is below 1")
        if self.requests_at_once > _MOST_AT_ONCE:
            raise UserError(
                f"the workload has concurrency={self.requests_at_once}, which is above"
                f" {_MOST_AT_ONCE}"
            )
        rate = self.request_rate_per_s
        if rate is not None and not 0 < rate <= _MOST_A_SECOND:
            raise UserError(
                f"the workload has rate={rate:g}, not above 0 and at most {_MOST_A_SECOND:g}"
            )
        whole = self.input_tokens + self.output_tokens
        if self.longest_context == 0:
            object.__setattr__(self, "longest_context", whole)
        if self.longest_context < whole:
            raise UserError(
                f"the workload has context={self.longest_context}, but input and output of a"
                f" request are {whole} tokens together"
            )

    @property
    def mean_context(self) -> int:
        """Tokens of a sequence half-way through its output."""
        return self.input_tokens + self.output_tokens // 2


def workload_within(most: int) -> Workload:
    """The usual one, or for models that read fewer tokens half of what they read, and a quarter
    written."""
    usual = Workload()
    if most >= usual.longest_context:
        return usual
    return Workload(max(1, most // 2), max(1, most // 4), usual.requests_at_once)


def parse_workload(text: str) -> Workload:
    """ "input=8192,output=512,concurrency=8,rate=2.5,context=32K", any of them left out.

    Raises UserError naming what does not parse.
    """
    given: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, sign, value = part.partition("=")
        if not sign or key not in _KEYS:
            raise UserError(
                f"'{part}' is no part of a workload", hint=f"such as {_EXAMPLE}; {_keys()}"
            )
        if key in given:
            raise UserError(f"the workload says {key} twice")
        try:
            given[key] = float(value) if key == "rate" else parse_count(value)
        except ValueError as error:
            raise UserError(f"{key}={value} is not a number", hint=f"such as {_EXAMPLE}") from error
    names = dict(zip(_KEYS, _FIELDS, strict=True))
    return Workload(**{names[key]: value for key, value in given.items()})


_FIELDS = (
    "input_tokens",
    "output_tokens",
    "requests_at_once",
    "request_rate_per_s",
    "longest_context",
)


def _keys() -> str:
    return "parts: " + ", ".join(_KEYS)
