"""What `bench quality` is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.core.config import REQUIRED, flag
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_drawable, require_least
from metainfer.plan.proof import LIMITS


@dataclass(frozen=True, slots=True)
class QualityLoad:
    """Two settings, and what both predict. A is what B is held against."""

    a: str = flag(
        "--a", "The setting that counts as right, as `bench paired` takes it", REQUIRED,
        unit="setting",
    )  # fmt: skip
    b: str = flag("--b", "The setting that is judged", REQUIRED, unit="setting")
    model: str | None = flag("MODEL", "As `metainfer bench stages` takes it", aliases=("--model",))
    layers: int | None = flag("--layers", "Only so many of the model's first layers", unit="n")
    text: Path | None = flag(
        "--text",
        'Held-out text, lines of {"source", "text"}; if not given, quality/heldout.jsonl in the'
        " model's directory, and without a tokenizer random token ids",
    )
    token_ids: Path | None = flag("--token-ids", "Windows of token ids, a list on each line")
    needles: Path | None = flag(
        "--needles",
        'Prompts that hide a fact, lines of {"prompt", "answer", "distance"}; if not given,'
        " quality/needles.jsonl in the model's directory",
    )
    windows: int = flag("--windows", "Windows that are predicted, at most", 16, unit="n")
    window_tokens: int = flag("--window-len", "Longest window", 1024, unit="tokens")
    most_needles: int = flag("--num-needles", "Needles that are looked for, at most", 32, unit="n")
    answers: int = flag("--answer-len", "Greedy tokens after each window", 16, unit="tokens")
    most_kl: float = flag("--most-kl", "Mean divergence that passes, nats per token", LIMITS["kl"])
    most_rise: float = flag(
        "--most-perplexity-rise",
        "Relative rise of perplexity that passes",
        LIMITS["perplexity_rise"],
        unit="share",
    )
    least_top1: float = flag(
        "--least-top1",
        "Share of equal likeliest tokens that passes",
        LIMITS["top1"],
        unit="share",
    )
    most_loss: float = flag(
        "--most-recall-loss",
        "Share of needles lost that passes",
        LIMITS["recall_loss"],
        unit="share",
    )
    seed: int = flag("--seed", "Fixes random token ids", 0)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--windows", self.windows, 1),
            ("--window-len", self.window_tokens, 2),
            ("--num-needles", self.most_needles, 0),
            ("--answer-len", self.answers, 1),
        ):
            require_least(name, value, least)
        require_drawable("--windows", self.windows)
        for name, limit, most in (
            ("--most-kl", self.most_kl, math.inf),
            ("--most-perplexity-rise", self.most_rise, math.inf),
            ("--least-top1", self.least_top1, 1.0),
            ("--most-recall-loss", self.most_loss, 1.0),
        ):
            if not 0 <= limit <= most or limit == math.inf:
                wanted = "a share from 0 to 1" if most == 1 else "a number from 0 on"
                raise UserError(f"{name} {limit:g} is not {wanted}")
        if self.text is not None and self.token_ids is not None:
            raise UserError("--text and --token-ids both say what is predicted")

    @property
    def thresholds(self) -> dict[str, float]:
        return {
            "kl": self.most_kl,
            "perplexity_rise": self.most_rise,
            "top1": self.least_top1,
            "recall_loss": self.most_loss,
        }

    def overrides(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Those of --hf-overrides, and the layers."""
        if self.layers is None:
            return given
        return {**(given or {}), "num_hidden_layers": self.layers}
