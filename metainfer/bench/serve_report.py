"""What is made of the times of a load: vLLM's result keys, and a table to read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from metainfer.bench.http_stream import Outcome
from metainfer.bench.record import provenance, table
from metainfer.bench.serve import Measured, Run
from metainfer.bench.serve_settings import ServeLoad, ServeResults

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "e2el": "whole request",
}
_MOST_ERRORS = 5


def record(
    measured: Measured, load: ServeLoad, results: ServeResults, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON record. Its top level is the run of median throughput, with vLLM's keys; `runs`
    holds all of them, `spread` says how far they lie apart."""
    runs = [summary(run, results) for run in measured.runs]
    ordered = sorted(runs, key=lambda run: float(run["total_token_throughput"]))
    throughputs = [float(run["total_token_throughput"]) for run in runs]
    return {
        **provenance(),
        "machine": dict(machine),
        "label": results.label,
        "backend": load.backend,
        "base_url": load.base_url,
        "model_id": measured.model,
        "dataset_name": load.dataset_name,
        "num_prompts": load.num_prompts,
        "random_input_len": load.random_input_len,
        "random_output_len": load.random_output_len,
        "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "ignore_eos": load.ignore_eos,
        "temperature": load.temperature,
        "seed": measured.seed,
        "repeats": len(runs),
        "interrupted": measured.interrupted,
        **ordered[(len(ordered) - 1) // 2],
        "spread": {"total_token_throughput": [min(throughputs), max(throughputs)]},
        "runs": runs,
    }


def summary(run: Run, results: ServeResults) -> dict[str, Any]:
    """One run, with vLLM's result keys. Times in milliseconds, rates per second."""
    good = [outcome for outcome in run.outcomes if not outcome.error]
    bad = [outcome for outcome in run.outcomes if outcome.error]
    duration_s = max(run.duration_s, 1e-9)
    num_input = sum(outcome.prompt_tokens for outcome in good)
    num_output = sum(outcome.output_tokens for outcome in good)
    figures: dict[str, Any] = {
        "duration": run.duration_s,
        "completed": len(good),
        "failed": len(bad),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "errors": sorted({outcome.error for outcome in bad})[:_MOST_ERRORS],
    }
    if results.goodput:
        met = sum(meets(outcome, results.goodput) for outcome in good)
        figures["request_goodput"] = met / duration_s
    for metric, values_ms in samples_ms(good).items():
        if metric in results.percentile_metrics and values_ms:
            figures |= _distribution(metric, values_ms, results.metric_percentiles)
    if results.save_detailed:
        figures["requests"] = [_detail(outcome, run) for outcome in run.outcomes]
    return figures


def samples_ms(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """All values of each metric, in milliseconds."""
    return {
        "ttft": [1e3 * o.ttft_s for o in outcomes],
        "tpot": [1e3 * o.tpot_s for o in outcomes if o.tpot_s is not None],
        "itl": [1e3 * gap_s for o in outcomes for gap_s in o.gaps_s],
        "e2el": [1e3 * o.latency_s for o in outcomes],
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def meets(outcome: Outcome, goals: Sequence[tuple[str, float]]) -> bool:
    """Whether a request kept every bound (milliseconds)."""
    values_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.latency_s}
    return all(1e3 * values_s[metric] <= bound_ms for metric, bound_ms in goals)


def text_report(record: Mapping[str, Any], results: ServeResults) -> str:
    """The record as tables of at most 100 columns."""
    lines = [
        f"{record['completed']} requests done, {record['failed']} failed,"
        f" in {record['duration']:.2f} s{' (interrupted)' if record['interrupted'] else ''}",
        f"tokens    {record['total_input_tokens']} in"
        f" ({record['total_cached_tokens']} from a cache), {record['total_output_tokens']} out",
        f"requests  {record['request_throughput']:.2f} per s",
        f"output    {record['output_throughput']:.1f} tokens per s",
        f"total     {record['total_token_throughput']:.1f} tokens per s",
    ]
    if "request_goodput" in record:
        lines.append(f"goodput   {record['request_goodput']:.2f} requests per s within the bounds")
    if record["repeats"] > 1:
        low, high = record["spread"]["total_token_throughput"]
        lines.append(
            f"spread    {low:.1f} to {high:.1f} tokens per s over {record['repeats']} runs"
        )
    names = ["mean", "median", *(f"p{p:g}" for p in results.metric_percentiles if p != 50)]
    rows = [
        [_TITLES[metric], *(f"{record[f'{name}_{metric}_ms']:.2f}" for name in names)]
        for metric in results.percentile_metrics
        if f"mean_{metric}_ms" in record
    ]
    if rows:
        lines += ["", table(["milliseconds", *names], rows)]
    lines += [f"failed: {error}" for error in record["errors"]]
    return "\n".join(lines)


def _distribution(
    metric: str, values_ms: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    return {
        f"mean_{metric}_ms": statistics.fmean(values_ms),
        f"median_{metric}_ms": statistics.median(values_ms),
        f"std_{metric}_ms": statistics.pstdev(values_ms),
        **{f"p{p:g}_{metric}_ms": percentile(values_ms, p) for p in percentiles},
    }


def _detail(outcome: Outcome, run: Run) -> dict[str, Any]:
    first_s = min(o.started_s for o in run.outcomes)
    return {
        "error": outcome.error,
        "sent_s": outcome.started_s - first_s,
        "latency_s": outcome.latency_s,
        "ttft_s": outcome.ttft_s,
        "itl_s": list(outcome.gaps_s),
        "input_len": outcome.prompt_tokens,
        "output_len": outcome.output_tokens,
        "generated_text": outcome.text,
    }
