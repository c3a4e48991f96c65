"""What `bench paired` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.bench.stages_settings import IN_TURNS, TOGETHER, StagesLoad
from metainfer.core.config import REQUIRED, flag, parse_positive
from metainfer.core.ranges import require_least

A, B = "A", "B"


@dataclass(frozen=True, slots=True)
class PairedLoad:
    """Two settings, and the work that they do pair by pair."""

    a: str = flag(
        "--a",
        "A setting: a stage, with flags of the engine behind a comma, such as"
        " 'tuned,--shared-expert-stream=off'",
        REQUIRED,
        unit="setting",
    )
    b: str = flag("--b", "The setting that is compared with it", REQUIRED, unit="setting")
    model: str | None = flag("MODEL", "As `metainfer bench stages` takes it", aliases=("--model",))
    layers: int | None = flag("--layers", "Only so many of the model's first layers", unit="n")
    pairs: int = flag("--pairs", "Pairs of turns at each piece of work", 35, unit="n")
    input_lens: tuple[int, ...] = flag(
        "--input-lens", "Lengths of prompts, one at a time", (1024,), unit="tokens", many=True
    )
    decode_batches: tuple[int, ...] = flag(
        "--decode-batches", "Sequences that decode together", (1,), unit="n", many=True
    )
    decode_context: int = flag(
        "--decode-context", "Length of the prompts before decoding", 256, unit="tokens"
    )
    decode_tokens: int = flag("--decode-len", "Tokens decoded per sequence", 32, unit="tokens")
    engines: str = flag(
        "--engines",
        "Whether both engines stay loaded beside each other, or are loaded for each of their turns,"
        " where they do not fit",
        TOGETHER,
        choices=(TOGETHER, IN_TURNS),
    )
    budget_s: float | None = flag(
        "--budget", "Begin no turn after this time", unit="seconds", parse=parse_positive
    )
    seed: int = flag("--seed", "Fixes the prompts", 0)

    def __post_init__(self) -> None:
        require_least("--pairs", self.pairs, 2)
        self.stages()  # checks the rest

    def stages(self) -> StagesLoad:
        """The same as turns of two settings, a round for each pair."""
        return StagesLoad(
            model=self.model,
            settings=(A, B),
            layers=self.layers,
            rounds=self.pairs,
            input_lens=self.input_lens,
            decode_batches=self.decode_batches,
            decode_context=self.decode_context,
            decode_tokens=self.decode_tokens,
            requests=0,
            engines=self.engines,
            budget_s=self.budget_s,
            seed=self.seed,
        )
