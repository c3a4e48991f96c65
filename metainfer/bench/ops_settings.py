"""What `bench ops` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metainfer.core.config import flag, parse_positive
from metainfer.core.ranges import require_least
from metainfer.hardware.device_names import parse_device
from metainfer.ops.use import PARTS


@dataclass(frozen=True, slots=True)
class OpsLoad:
    """Which operations are measured, at which sizes and as which code."""

    models: tuple[str, ...] = flag(
        "MODEL",
        "Known names or checkpoint directories; the shipped model if not given",
        (),
        aliases=("--model",),
        many=True,
    )
    tensor_parallel_sizes: tuple[int, ...] = flag(
        "--tensor-parallel-size",
        "Ranks that share a layer; one of them is measured",
        (1,),
        aliases=("--tp",),
        unit="n",
        many=True,
    )
    ops: str = flag(
        "--ops", "Operations whose names match, such as 'attention.*'", "*", unit="pattern"
    )
    part: str | None = flag("--part", "Only the operations of this part", choices=PARTS)
    device: str | None = flag(
        "--device",
        "Where: cpu, cuda, or one GPU such as cuda:1; the GPU if there is one",
        unit="device",
        parse=parse_device,
    )
    code_for: str | None = flag(
        "--as", "Measure the code for this older GPU too, such as sm_89", unit="target"
    )
    prefill_rows: int | None = flag(
        "--prefill-rows", "Rows of a step of prefill; 8,192 on a GPU, 256 on a CPU", unit="rows"
    )
    decode_batches: tuple[int, ...] = flag(
        "--decode-batches", "Rows of steps of decode", (1, 64), unit="rows", many=True
    )
    context: int | None = flag(
        "--context",
        "Tokens that the last row sees; 32,768 on a GPU, 2,048 on a CPU",
        unit="tokens",
    )
    rounds: int = flag("--rounds", "Turns of each side at each operation", 5, unit="n")
    budget_s: float | None = flag(
        "--budget", "Begin no operation after this time", unit="seconds", parse=parse_positive
    )
    generic: bool = flag("--generic", "Measure what torch composes of the same too", True)

    def __post_init__(self) -> None:
        require_least("--tensor-parallel-size", self.tensor_parallel_sizes, 1)
        require_least("--prefill-rows", self.prefill_rows, 1)
        require_least("--decode-batches", self.decode_batches, 1)
        require_least("--context", self.context, 1)
        require_least("--rounds", self.rounds, 1)


@dataclass(frozen=True, slots=True)
class OpsResults:
    """What is reported, and where to."""

    save_result: bool = flag("--save-result", "Write the JSON record to a file", False)
    result_dir: Path = flag("--result-dir", "Directory of the file", Path("."))
    result_filename: str = flag("--result-filename", "Its name", "bench-ops.json", unit="name")
    json: bool = flag("--json", "Print the JSON record to stdout instead of the table", False)
