"""What `profile` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metainfer.core.config import flag
from metainfer.core.ranges import require_least


@dataclass(frozen=True, slots=True)
class ProfileLoad:
    """The steps that are taken apart."""

    model: str | None = flag("MODEL", "As `metainfer bench stages` takes it", aliases=("--model",))
    setting: str = flag(
        "--setting", "A stage, with flags of the engine behind a comma, as `bench paired` takes it",
        "tuned",
    )  # fmt: skip
    layers: int | None = flag("--layers", "Only so many of the model's first layers", unit="n")
    prefill_tokens: int = flag(
        "--input-len", "Length of the prompt whose last step is taken apart", 1024, unit="tokens"
    )
    decode_batches: tuple[int, ...] = flag(
        "--decode-batches", "Sequences of the decode steps", (1, 8), unit="n", many=True
    )
    decode_context: int = flag(
        "--decode-context", "Tokens of each of them in the cache", 1024, unit="tokens"
    )
    repeats: int = flag("--repeats", "How often each step is run; medians are told", 5, unit="n")

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--layers", self.layers, 1),
            ("--input-len", self.prefill_tokens, 1),
            ("--decode-batches", self.decode_batches, 1),
            ("--decode-context", self.decode_context, 1),
            ("--repeats", self.repeats, 1),
        ):
            require_least(name, value, least)

    def overrides(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Those of --hf-overrides, and the layers."""
        if self.layers is None:
            return given
        return {**(given or {}), "num_hidden_layers": self.layers}
