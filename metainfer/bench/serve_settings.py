"""What `bench serve` is asked for. Names and meanings follow vLLM's `bench serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from metainfer.core.config import flag
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_above_zero, require_drawable, require_least, require_range

METRICS = ("ttft", "tpot", "itl", "e2el")
ENDPOINTS = MappingProxyType({"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"})


def parse_metrics(text: str) -> tuple[str, ...]:
    """ "ttft,itl" -> names of metrics."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in METRICS:
            raise UserError(f"'{name}' is not a metric; they are {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """ "50,99.9" -> numbers between 0 and 100."""
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise UserError(f"'{text}': percentiles lie between 0 and 100")
    return values


def parse_goal(text: str) -> tuple[str, float]:
    """ "ttft:500" -> ("ttft", 500.0), a bound in milliseconds."""
    name, colon, bound = text.partition(":")
    if not colon or name not in ("ttft", "tpot", "e2el"):
        raise UserError(f"'{text}' is not a goal such as ttft:500, tpot:50 or e2el:3000")
    return name, float(bound)


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """The load: where it goes, what is sent, when."""

    base_url: str = flag("--base-url", "The server", "http://127.0.0.1:8000", unit="url")
    backend: str = flag(
        "--backend",
        "Text completions, or chat completions",
        "openai",
        choices=tuple(ENDPOINTS),
        aliases=("--endpoint-type",),
    )
    model: str | None = flag(
        "--model", "Model name to ask for; the server's first one if not given"
    )
    api_key: str | None = flag("--api-key", "Key to send", env="METAINFER_API_KEY")
    dataset_name: str = flag(
        "--dataset-name",
        "Random words, or passages of a text file; no prompt is sent twice",
        "random",
        choices=("random", "text"),
    )
    dataset_path: Path | None = flag("--dataset-path", "The file of --dataset-name text")
    num_prompts: int = flag("--num-prompts", "Requests of one run", 100, unit="n")
    random_input_len: int = flag(
        "--random-input-len",
        "Length of a prompt; met within some per cent, since words are sent and the server counts",
        1024,
        aliases=("--input-len",),
        unit="tokens",
    )
    random_output_len: int = flag(
        "--random-output-len",
        "Most tokens of an answer",
        128,
        aliases=("--output-len",),
        unit="tokens",
    )
    random_range_ratio: float = flag(
        "--random-range-ratio",
        "Lengths are drawn from [length * (1 - r), length * (1 + r)]",
        0.0,
        unit="r",
    )
    ignore_eos: bool = flag(
        "--ignore-eos", "Always produce the full length (a field of vLLM's, not of OpenAI's)", False
    )
    temperature: float | None = flag("--temperature", "Sampling temperature", 0.0)
    request_rate: float = flag(
        "--request-rate",
        "Requests that arrive per second; inf: all at once",
        math.inf,
        unit="per_s",
    )
    burstiness: float = flag(
        "--burstiness",
        "Shape of the gamma distribution of the gaps: 1 is a Poisson process, less is burstier",
        1.0,
    )
    max_concurrency: int | None = flag(
        "--max-concurrency", "Requests in flight at most; no limit if not given", unit="n"
    )
    num_warmups: int = flag("--num-warmups", "Requests sent before the clock starts", 1, unit="n")
    request_timeout_s: float = flag(
        "--request-timeout", "A request that takes longer has failed", 600.0, unit="seconds"
    )
    repeats: int = flag("--repeats", "Runs, each with prompts of its own", 1, unit="n")
    seed: int | None = flag(
        "--seed", "Fixes lengths, words and arrivals; drawn and recorded if not given", unit="n"
    )

    def __post_init__(self) -> None:
        require_least("--num-prompts", self.num_prompts, 1)
        require_drawable("--num-prompts", self.num_prompts)
        require_least("--random-input-len", self.random_input_len, 1)
        require_least("--random-output-len", self.random_output_len, 1)
        require_range(
            "--random-range-ratio",
            self.random_range_ratio,
            lambda ratio: 0.0 <= ratio < 1.0,
            "at least 0 and below 1",
        )
        require_above_zero("--request-rate", self.request_rate)
        require_above_zero("--burstiness", self.burstiness)
        require_least("--max-concurrency", self.max_concurrency, 1)
        require_least("--num-warmups", self.num_warmups, 0)
        require_above_zero("--request-timeout", self.request_timeout_s)
        require_least("--repeats", self.repeats, 1)
        _require(
            (self.dataset_name == "text") == (self.dataset_path is not None),
            "--dataset-name text and --dataset-path go together",
        )


@dataclass(frozen=True, slots=True)
class ServeResults:
    """What is reported, and where to."""

    percentile_metrics: tuple[str, ...] = flag(
        "--percentile-metrics",
        "Metrics with percentiles, with commas between",
        METRICS,
        parse=parse_metrics,
        unit="names",
    )
    metric_percentiles: tuple[float, ...] = flag(
        "--metric-percentiles",
        "Percentiles, with commas between",
        (50.0, 90.0, 99.0),
        parse=parse_percentiles,
        unit="numbers",
    )
    goodput: tuple[tuple[str, float], ...] = flag(
        "--goodput",
        "Count requests that meet these bounds in milliseconds: ttft:500 tpot:50 e2el:3000",
        (),
        parse=parse_goal,
        unit="goal",
        many=True,
    )
    save_result: bool = flag("--save-result", "Write the JSON record to a file", False)
    save_detailed: bool = flag("--save-detailed", "Put every request into the record", False)
    result_dir: Path = flag("--result-dir", "Directory of the file", Path("."))
    result_filename: str | None = flag(
        "--result-filename", "Its name; made of date, model and load if not given", unit="name"
    )
    label: str | None = flag("--label", "A word of yours to put into the record")
    json: bool = flag("--json", "Print the JSON record to stdout instead of the table", False)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)
