"""The launch command of an engine that comes nearest to a plan, and what it cannot express."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from metainfer.arch.attention_sides import V41_FAMILY
from metainfer.hardware.facts import Unknown
from metainfer.hardware.visible import VARIABLE, numbers_of
from metainfer.ops.attention import DENSE
from metainfer.ops.cache_formats import CODED_KEYS, PLAIN
from metainfer.plan.command_text import command_lines
from metainfer.plan.engine_commands import SGLANG, VLLM
from metainfer.plan.found import Candidate
from metainfer.plan.layout_flags import (
    axes_of,
    converted,
    has_flag,
    not_done,
    not_run,
    sizes_of,
    words_of,
)
from metainfer.plan.layouts import RELEASED
from metainfer.plan.search import Result
from metainfer.plan.speculation import drafts_a_block, tokens_text

METAINFER = "metainfer"

_CHANNELS = 8
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Emitted:
    """Attributes:
    engine: whose commands these are.
    commands: one for each server, with its environment before it.
    lost: sentences: what of the plan they do not say.
    unsure: likewise, of flags that the engine may not take for this model.
    """

    engine: str
    commands: tuple[str, ...]
    lost: tuple[str, ...]
    unsure: tuple[str, ...]

    def text(self) -> str:
        """For a shell, over lines of at most 100 columns where words allow it."""
        lines = [*self.notes("# ")]
        for command in self.commands:
            lines += command_lines(command, _WIDTH)
        return "\n".join(lines)

    def notes(self, indent: str) -> list[str]:
        lines = []
        for label, sentences in (("not expressed", self.lost), ("not sure", self.unsure)):
            for sentence in sentences:
                lines += textwrap.wrap(
                    f"{label}: {sentence}",
                    _WIDTH,
                    initial_indent=indent,
                    subsequent_indent=f"{indent}  ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
        return lines


def emit(result: Result, engine: str, model: str, requests: int | None = None) -> Emitted:
    """Of the best layout.

    Args:
        model: as the engine is to be told, a directory or a name.
        requests: that all servers let run at once; if not given, those of the workload.
    """
    if requests is not None:
        result = replace(result, workload=replace(result.workload, requests_at_once=requests))
    best = result.best
    makers = {METAINFER: _metainfer, VLLM: _vllm, SGLANG: _sglang}
    layout = best.layouts.decode
    servers = 1 if engine == SGLANG else layout.replicas
    each = layout.group * layout.pipeline
    commands = []
    for server in range(servers):
        environment = list(_environment(result, engine))
        if servers > 1:
            gpus = ",".join(numbers_of(result.machine)[server * each : (server + 1) * each])
            environment.insert(0, f"{VARIABLE}={gpus}")
        words = makers[engine](result, best, model)
        if servers > 1:
            words += ["--port", str(8000 + server)]
        commands.append(" ".join([*environment, *map(shlex.quote, words)]))
    lost, unsure = _lost(result, best, engine), _unsure(result, best, engine)
    return Emitted(engine, tuple(commands), tuple(lost), tuple(unsure))


def _requests(result: Result, best: Candidate) -> int:
    """Of one server."""
    return -(-result.workload.requests_at_once // best.layouts.decode.replicas)


def _metainfer(result: Result, best: Candidate, model: str) -> list[str]:
    requests, longest = _requests(result, best), result.workload.longest_context
    axes = {name: value for name, value in axes_of(best.layouts).items() if has_flag(name)}
    sizes = sizes_of(best.formats, longest, requests)
    return ["metainfer", "serve", model, *words_of({**axes, **sizes})]


def _vllm(result: Result, best: Candidate, model: str) -> list[str]:
    layout = best.layouts.decode
    words = ["vllm", "serve", model, "--max-model-len", str(result.workload.longest_context)]
    words += ["--max-num-seqs", str(_requests(result, best))]
    words += ["--max-num-batched-tokens", str(best.formats.chunk_rows)]
    words += _count("--tensor-parallel-size", layout.tensor)
    words += _count("--pipeline-parallel-size", layout.pipeline)
    if layout.expert == layout.group > 1:
        words.append("--enable-expert-parallel")
    words += _count("--decode-context-parallel-size", layout.kv_shards)
    words += _cache_format(result, best, "fp8")
    if best.formats.draft and not drafts_a_block(result.shape):
        told = {"method": "mtp", "num_speculative_tokens": best.formats.draft}
        words += ["--speculative-config", json.dumps(told)]
    return words


def _sglang(result: Result, best: Candidate, model: str) -> list[str]:
    layout = best.layouts.decode
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += ["--context-length", str(result.workload.longest_context)]
    words += ["--max-running-requests", str(result.workload.requests_at_once)]
    words += ["--chunked-prefill-size", str(best.formats.chunk_rows)]
    words += _count("--tp-size", layout.tensor)
    words += _count("--pp-size", layout.pipeline)
    words += _count("--dp-size", layout.replicas)
    words += _count("--ep-size", layout.expert)
    words += _cache_format(result, best, "fp8_e4m3")
    drafts = best.formats.draft
    if drafts and not drafts_a_block(result.shape):
        # A chain: one token a step, and the last one's successor comes from the model itself.
        words += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(drafts)]
        words += ["--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(drafts + 1)]
    return words


def _count(name: str, count: int) -> list[str]:
    return [name, str(count)] if count > 1 else []


def _cache_format(result: Result, best: Candidate, spelled: str) -> list[str]:
    released = result.shape.side.entry_format
    latents = best.formats.latents
    if latents in PLAIN:
        return ["--kv-cache-dtype", "bfloat16"]
    coded = latents == "fp8" or (latents == RELEASED and released != DENSE)
    return ["--kv-cache-dtype", spelled] if coded else []


def _environment(result: Result, engine: str) -> Iterator[str]:
    """What NCCL gets wrong on PCIe by itself."""
    layout = result.best.layouts.decode
    machine = result.machine
    if engine == METAINFER or layout.group == 1 or machine.nvlink is True:
        return
    if result.phases.transfers.p2p(layout.group, layout.replicas * layout.pipeline):
        yield "NCCL_P2P_LEVEL=SYS"
    if layout.group > 2:
        yield f"NCCL_MIN_NCHANNELS={_CHANNELS}"


def _lost(result: Result, best: Candidate, engine: str) -> Iterator[str]:
    if engine == METAINFER:
        if result.shape.arch is None:
            yield f"{result.shape.name} is planned for, and not served by this version"
        yield from not_run(best.layouts)
        yield from not_done(best.formats)
    else:
        yield from _lost_layout(best, engine)
        yield from _lost_formats(result, best)
    machine = result.machine
    unused = 0 if isinstance(machine.gpus, Unknown) else len(machine.gpus) - best.layouts.gpus
    if unused > 0:
        yield f"{unused} GPUs are not used"


def _lost_layout(best: Candidate, engine: str) -> Iterator[str]:
    before, layout = best.layouts.prefill, best.layouts.decode
    if before.context > 1:
        yield (
            f"prompts divided by tokens over {before.context} ranks (CP{before.context}): heads"
            " are divided instead"
        )
    if engine == SGLANG and layout.kv_shards > 1:
        yield f"caches of decoding divided over {layout.kv_shards} ranks"
    if engine == VLLM and 1 < layout.expert < layout.group:
        yield f"experts in {layout.expert} parts of {layout.group} ranks: slices of each instead"


def _unsure(result: Result, best: Candidate, engine: str) -> Iterator[str]:
    """Flags that an engine has, of which it is not known whether it takes them for this model."""
    layout, name = best.layouts.decode, result.shape.name
    served = result.shape.arch is not None
    if engine == VLLM and layout.kv_shards > 1:
        yield f"whether vLLM takes --decode-context-parallel-size for {name}"
    if engine != METAINFER and best.formats.latents in PLAIN:
        yield f"whether {engine} takes --kv-cache-dtype bfloat16 for {name}"
    if engine != METAINFER and layout.pipeline > 1 and result.shape.side.family == V41_FAMILY:
        yield f"whether {engine} runs {name} in stages: SGLang refused it once (sglang 40877)"
    if engine != METAINFER and best.formats.draft and not (served or drafts_a_block(result.shape)):
        yield f"whether {engine} drafts {name} by this method"


def _lost_formats(result: Result, best: Candidate) -> Iterator[str]:
    formats = best.formats
    if formats.wire != "bf16":
        yield f"activations of prompts in {formats.wire} between ranks"
    if formats.draft and drafts_a_block(result.shape):
        yield (
            f"drafting {tokens_text(formats.draft)} with the blocks that {result.shape.name}"
            " has for it: how this engine is told so is not known here"
        )
    if formats.index_keys not in (RELEASED, formats.latents, CODED_KEYS):
        yield f"index keys in {formats.index_keys}: how this engine is told so is not known here"
    yield from converted(formats)
    if result.shape.engram is not None:
        yield f"n-gram tables on {formats.engram}: where they lie is the engine's choice"
