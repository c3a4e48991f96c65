"""What `bench stages` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.bench.stage import USUAL_STAGES
from metainfer.bench.traffic import Pattern
from metainfer.core.config import flag, parse_positive
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_above_zero, require_drawable, require_least, require_range

AUTO, TOGETHER, IN_TURNS = "auto", "together", "in-turns"
TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class StagesLoad:
    """The work that all settings do in turn."""

    model: str | None = flag(
        "MODEL",
        "A checkpoint directory; with --load-format dummy also a known name, or a directory that"
        " holds config.json alone; the shipped model if not given",
        aliases=("--model",),
    )
    settings: tuple[str, ...] = flag(
        "--settings",
        "What is compared: stages, with flags of the engine behind a comma, such as"
        " 'tuned,--threads=1'",
        USUAL_STAGES,
        unit="setting",
        many=True,
    )
    against: str | None = flag(
        "--against", "A peer on the same weights and device", choices=(TRANSFORMERS,)
    )
    layers: int | None = flag("--layers", "Only so many of the model's first layers", unit="n")
    rounds: int = flag("--rounds", "Turns of each setting at each piece of work", 3, unit="n")
    input_lens: tuple[int, ...] = flag(
        "--input-lens", "Lengths of prompts, one at a time", (256, 1024), unit="tokens", many=True
    )
    decode_batches: tuple[int, ...] = flag(
        "--decode-batches", "Sequences that decode together", (1, 8), unit="n", many=True
    )
    decode_context: int = flag(
        "--decode-context", "Length of the prompts before decoding", 256, unit="tokens"
    )
    decode_tokens: int = flag("--decode-len", "Tokens decoded per sequence", 32, unit="tokens")
    requests: int = flag("--num-prompts", "Requests of the traffic; 0 leaves it out", 12, unit="n")
    request_rate: float = flag(
        "--request-rate", "Requests per second of it, Poisson", 2.0, parse=parse_positive
    )
    traffic_lens: tuple[int, ...] = flag(
        "--traffic-lens",
        "Shortest and longest prompt of it, log-uniform between",
        (64, 512),
        unit="tokens",
        many=True,
    )
    traffic_output: int = flag("--traffic-output-len", "Tokens of its answers", 16, unit="tokens")
    multi_turn: float = flag(
        "--multi-turn-share", "Of its requests that go on with an earlier one", 0.25, unit="share"
    )
    longest_warm_up: int | None = flag(
        "--longest-warm-up", "Cut the prompts of turns that warm up to this length", unit="tokens"
    )
    check_positions: int = flag(
        "--check-positions",
        "Before the turns, compute a prompt of the longest length and hold so many of its positions"
        " against the references, in every layer; with --rounds 0 nothing else is done",
        0,
        unit="n",
    )
    engines: str = flag(
        "--engines",
        "Whether engines stay loaded beside each other, or are loaded for each of their turns;"
        " auto: beside each other if they fit",
        AUTO,
        choices=(AUTO, TOGETHER, IN_TURNS),
    )
    budget_s: float | None = flag(
        "--budget",
        "Begin no work after this time; loading and work that warms up count",
        unit="seconds",
        parse=parse_positive,
    )
    seed: int = flag("--seed", "Fixes prompts and arrivals", 0)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--layers", self.layers, 1),
            ("--rounds", self.rounds, 0 if self.check_positions else 1),
            ("--input-lens", self.input_lens, 1),
            ("--decode-batches", self.decode_batches, 1),
            ("--decode-context", self.decode_context, 1),
            ("--decode-len", self.decode_tokens, 2),
            ("--num-prompts", self.requests, 0),
            ("--traffic-lens", self.traffic_lens, 1),
            ("--traffic-output-len", self.traffic_output, 1),
            ("--longest-warm-up", self.longest_warm_up, 1),
            ("--check-positions", self.check_positions, 0),
        ):
            require_least(name, value, least)
        require_drawable("--num-prompts", self.requests)
        if len(self.traffic_lens) != 2 or self.traffic_lens[0] > self.traffic_lens[1]:
            raise UserError("--traffic-lens takes two lengths, the shorter first")
        require_above_zero("--request-rate", self.request_rate)
        require_range("--multi-turn-share", self.multi_turn, lambda n: 0 <= n <= 1, "from 0 to 1")
        if len(set(self.settings)) < len(self.settings):
            raise UserError("--settings names one setting twice")

    @property
    def pattern(self) -> Pattern:
        shortest, longest = self.traffic_lens
        return Pattern(
            self.requests,
            self.request_rate,
            shortest,
            longest,
            self.traffic_output,
            self.multi_turn,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        traffic = self.traffic_lens[1] + self.traffic_output if self.requests else 0
        return max(max(self.input_lens) + 1, self.decode_context + self.decode_tokens, traffic)

    def overrides(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Those of --hf-overrides, and the layers."""
        if self.layers is None:
            return given
        return {**(given or {}), "num_hidden_layers": self.layers}


@dataclass(frozen=True, slots=True)
class BenchResults:
    """What is reported, and where to."""

    save_result: bool = flag(
        "--save-result",
        "Write the JSON record to a file, and beside it a picture (.svg) where matplotlib is"
        " installed",
        False,
    )
    result_dir: Path = flag("--result-dir", "Directory of the file", Path("."))
    result_filename: str | None = flag(
        "--result-filename", "Its name; that of the verb if not given", unit="name"
    )
    json: bool = flag("--json", "Print the JSON record to stdout instead of the table", False)
