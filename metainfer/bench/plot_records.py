"""What `bench plot` needs of the records of `bench model` and `bench serve`, read and checked.

No file is trusted: whatever is missing, or of another type, is named with its place.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metainfer.bench.contender import ENGINE
from metainfer.bench.http_stream import Outcome
from metainfer.bench.model import side_title
from metainfer.bench.serve_report import percentile, samples_ms
from metainfer.core.errors import UserError

_MOST_RECORDS = 32
_LONGEST_TEXT = 60
_WRITTEN_BY = "`metainfer bench model --save-result` and `bench serve --save-result` write records"


@dataclass(frozen=True, slots=True)
class Side:
    """One side of `bench model`. `rates`: name of the work -> tokens per second of each round."""

    title: str
    rates: Mapping[str, tuple[float, ...]]
    libraries_bytes: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """The engine's rate over the faster peer's: median, least and most of the rounds."""

    work: str
    peer: str
    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A record of `bench model`. The engine is first in `sides`; `origin` is for the footer."""

    name: str
    origin: str
    model: str
    sides: tuple[Side, ...]
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class ServeRun:
    """One run of a load.

    Attributes:
        throughput: tokens per second, of prompts and answers.
        ttft_ms: "p50" and "p99" -> that percentile; a missing one is not in the record.
        samples_ms: metric -> every value; None where the record holds no requests.
    """

    completed: int
    failed: int
    throughput: float
    ttft_ms: Mapping[str, float]
    samples_ms: Mapping[str, Sequence[float]] | None


@dataclass(frozen=True, slots=True)
class ServeRecord:
    """A record of `bench serve`.

    Attributes:
        name: what tells it from the others in one picture.
        series: what its load was put on; records of one series differ in their load.
        load, load_order: in words, and as numbers that sort.
    """

    name: str
    file: str
    origin: str
    series: str
    load: str
    load_order: tuple[float, float]
    runs: tuple[ServeRun, ...]

    @property
    def median_run(self) -> ServeRun:
        """The run of median throughput, as the record itself chooses it."""
        ordered = sorted(self.runs, key=lambda run: run.throughput)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def detailed(self) -> bool:
        return all(run.samples_ms is not None for run in self.runs)


def read_records(paths: Sequence[Path]) -> list[ModelRecord] | list[ServeRecord]:
    """All records, which are of one kind. Raises UserError naming what cannot be drawn."""
    if not paths or len(paths) > _MOST_RECORDS:
        raise UserError(
            f"{len(paths)} records; a picture holds 1 to {_MOST_RECORDS}",
            hint="draw fewer at once",
        )
    models, serves = [], []
    for path in paths:
        node = _Node(str(path), "", _read_json(path))
        if node.has("sides") and node.has("works"):
            models.append((path, _model_record(path, node)))
        elif node.has("runs") and node.has("backend"):
            serves.append((path, _serve_record(path, node)))
        else:
            raise UserError(
                f"{path} is no record of `bench model` or `bench serve`", hint=_WRITTEN_BY
            )
    if models and serves:
        raise UserError(
            f"{models[0][0]} is a record of `bench model`, {serves[0][0]} one of `bench serve`",
            hint="draw each kind on its own",
        )
    if models:
        return [record for _, record in models]
    return _checked_serves([record for _, record in serves])


def without_requests(records: Sequence[ModelRecord | ServeRecord]) -> list[str]:
    """Files of `bench serve` that hold no times of single requests."""
    return [r.file for r in records if isinstance(r, ServeRecord) and not r.detailed]


def _checked_serves(records: list[ServeRecord]) -> list[ServeRecord]:
    """With names that differ; refused if what is to be drawn of them is not there."""
    for record in records:
        if not any(run.completed for run in record.runs):
            raise UserError(
                f"{record.file}: no request succeeded, so there are no times to draw",
                hint="its `errors` say why",
            )
        if len(records) == 1 and not record.detailed:
            raise UserError(
                f"{record.file} holds no times of single requests, which distributions need",
                hint="measure with `metainfer bench serve --save-result --save-detailed`",
            )
        for name in ("p50", "p99"):
            if len(records) > 1 and name not in record.median_run.ttft_ms:
                raise UserError(
                    f"{record.file} holds no {name} of the time to the first token",
                    hint="measure with --save-detailed, or with ttft in --percentile-metrics and"
                    " 99 in --metric-percentiles",
                )
    seen = Counter(record.name for record in records)
    return [
        replace(r, name=f"{r.name} ({_clean(r.file)})") if seen[r.name] > 1 else r for r in records
    ]


def _model_record(path: Path, node: _Node) -> ModelRecord:
    works = [
        Ratio(
            work.get("name").text(),
            side_title(work.get("peer").text()),
            *(work.get(key).number() for key in ("ratio", "ratio_low", "ratio_high")),
        )
        for work in node.get("works").filled()
    ]
    sides = []
    for side in node.get("sides").filled():
        name, dtype = side.get("side").text(), side.get("dtype").text()
        rates = side.get("tokens_per_s")
        sides.append(
            Side(
                f"{name} {dtype}" if name == ENGINE else side_title(name),
                {
                    ratio.work: tuple(n.number() for n in rates.get(ratio.work).filled())
                    for ratio in works
                },
                side.get("libraries_bytes").number(),
                side.get("peak_bytes").number(),
            )
        )
    model = node.get("model").text()
    threads = node.get("threads").number()
    origin = f"{model}; {_machine(node)}, {threads:g} threads; {_commit(node)}"
    return ModelRecord(_clean(path.name), origin, model, tuple(sides), tuple(works))


def _serve_record(path: Path, node: _Node) -> ServeRecord:
    model, label = node.get("model_id").text(), node.get("label")
    series = model if label.value is None else label.text()
    rate_node, most_node = node.get("request_rate"), node.get("max_concurrency")
    rate = math.inf if rate_node.value == "inf" else rate_node.number()
    most = math.inf if most_node.value is None else most_node.number()
    words = [f"{rate:g} req/s"] if math.isfinite(rate) else []
    words += [f"at most {most:g} at once"] if math.isfinite(most) else []
    load = ", ".join(words) or "all at once"
    return ServeRecord(
        f"{series}, {load}",
        path.name,
        f"{model}; load from {_machine(node)}; {_commit(node)}",
        series,
        load,
        (rate, most),
        tuple(_serve_run(run) for run in node.get("runs").filled()),
    )


def _serve_run(node: _Node) -> ServeRun:
    samples = None
    if node.has("requests"):
        outcomes = [_outcome(request) for request in node.get("requests").items()]
        samples = samples_ms([outcome for outcome in outcomes if not outcome.error])
    keys = {"p50": "median_ttft_ms", "p99": "p99_ttft_ms"}
    ttft_ms = {name: node.get(key).number() for name, key in keys.items() if node.has(key)}
    if samples and samples["ttft"]:
        ttft_ms = {"p50": percentile(samples["ttft"], 50), "p99": percentile(samples["ttft"], 99)}
    return ServeRun(
        int(node.get("completed").number()),
        int(node.get("failed").number()),
        node.get("total_token_throughput").number(),
        ttft_ms,
        samples,
    )


def _outcome(node: _Node) -> Outcome:
    error = node.get("error").value
    if error:
        return Outcome(str(error), 0.0, 0.0)
    return Outcome(
        "",
        0.0,
        node.get("latency_s").number(),
        node.get("ttft_s").number(),
        tuple(gap.number() for gap in node.get("itl_s").items()),
        output_tokens=int(node.get("output_len").number()),
    )


def _machine(node: _Node) -> str:
    """Processor, cores and GPUs in few words."""
    cpu = node.get("machine").get("cpu")
    model = cpu.get("model")
    named = "unknown processor" if isinstance(model.value, dict) else model.text()
    words = [named, f"{cpu.get('physical_cores').number():g} cores"]
    gpus = node.get("machine").get("gpus")
    if isinstance(gpus.value, list):
        counted = Counter(gpu.get("name").text() for gpu in gpus.items())
        words += [f"{count} x {name}" for name, count in counted.items()]
    return ", ".join(words)


def _commit(node: _Node) -> str:
    commit = node.get("commit").text()
    return f"commit {commit[:12]}{'+' if commit.endswith('+') and len(commit) > 12 else ''}"


def _clean(text: str) -> str:
    """One short line that every format can hold."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 1] + "…"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", hint=_WRITTEN_BY) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: {reason}", hint=_WRITTEN_BY) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({_clean(str(error))})", hint=_WRITTEN_BY) from error


@dataclass(frozen=True, slots=True)
class _Node:
    """A value in a JSON file that knows where it stands, for the errors."""

    file: str
    place: str
    value: Any

    def has(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def get(self, key: str) -> _Node:
        place = f"{self.place}.{key}" if self.place else key
        if not self.has(key):
            raise UserError(f"{self.file} has no `{place}`", hint=_WRITTEN_BY)
        return _Node(self.file, place, self.value[key])

    def items(self) -> Iterator[_Node]:
        if not isinstance(self.value, list):
            raise self._wrong("a list")
        for n, item in enumerate(self.value):
            yield _Node(self.file, f"{self.place}[{n}]", item)

    def filled(self) -> list[_Node]:
        items = list(self.items())
        if not items:
            raise self._wrong("a list that holds something")
        return items

    def number(self) -> float:
        """Finite and not negative, as everything that is measured."""
        if isinstance(self.value, int | float) and not isinstance(self.value, bool):
            try:
                number = float(self.value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number) and number >= 0:
                return number
        raise self._wrong("a number from 0 up")

    def text(self) -> str:
        if not isinstance(self.value, str) or not _clean(self.value):
            raise self._wrong("a text")
        return _clean(self.value)

    def _wrong(self, wanted: str) -> UserError:
        return UserError(f"{self.file}: `{self.place}` is not {wanted}", hint=_WRITTEN_BY)
