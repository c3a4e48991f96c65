"""What `bench model` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metainfer.core.config import flag
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_least


def parse_batches(text: str) -> tuple[int, ...]:
    """ "1,8" -> batch sizes."""
    batches = tuple(int(part) for part in text.split(","))
    if not all(batch >= 1 for batch in batches):
        raise UserError(f"'{text}': batch sizes are at least 1")
    return batches


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The work that both sides do in turn."""

    model: str | None = flag(
        "MODEL", "A checkpoint directory; the shipped model if not given", aliases=("--model",)
    )
    rounds: int = flag("--rounds", "Turns of each side at each piece of work", 5, unit="n")
    prefill_tokens: int = flag("--prefill-len", "Length of the prompt", 2048, unit="tokens")
    decode_batches: tuple[int, ...] = flag(
        "--decode-batches",
        "Sequences that decode together, with commas between",
        (1, 8),
        parse=parse_batches,
        unit="numbers",
    )
    decode_context: int = flag(
        "--decode-context", "Length of the prompts before decoding", 256, unit="tokens"
    )
    decode_tokens: int = flag("--decode-len", "Tokens decoded per sequence", 32, unit="tokens")
    agreement_prompts: int = flag(
        "--agreement-prompts", "Prompts on which greedy tokens are compared", 4, unit="n"
    )
    agreement_tokens: int = flag(
        "--agreement-len", "Greedy tokens compared per prompt", 32, unit="tokens"
    )
    threads: int | None = flag("--threads", "CPU threads of each side; all cores if not given")
    seed: int = flag("--seed", "Fixes the prompts", 0)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--rounds", self.rounds, 1),
            ("--prefill-len", self.prefill_tokens, 1),
            ("--decode-context", self.decode_context, 1),
            ("--decode-len", self.decode_tokens, 2),
            ("--agreement-prompts", self.agreement_prompts, 0),
            ("--agreement-len", self.agreement_tokens, 1),
            ("--threads", self.threads, 1),
        ):
            require_least(name, value, least)


@dataclass(frozen=True, slots=True)
class ModelResults:
    """What is reported, and where to."""

    save_result: bool = flag("--save-result", "Write the JSON record to a file", False)
    result_dir: Path = flag("--result-dir", "Directory of the file", Path("."))
    result_filename: str = flag("--result-filename", "Its name", "bench-model.json", unit="name")
    json: bool = flag("--json", "Print the JSON record to stdout instead of the table", False)
