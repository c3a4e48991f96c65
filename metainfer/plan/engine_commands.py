"""Commands that start vLLM or SGLang, read flag by flag (data/engine_flags.json)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath

from metainfer.arch.families import known_names
from metainfer.core.config import parse_count
from metainfer.core.errors import UserError
from metainfer.plan.command_text import text_of_command
from metainfer.plan.layouts import RELEASED, Layout, Layouts

_FILE = Path(__file__).parent / "data" / "engine_flags.json"

VLLM, SGLANG = "vllm", "sglang"
KEPT, MAPPED, NO_EFFECT, ABSENT, UNKNOWN = "kept", "mapped", "no effect", "absent", "unknown"
VERDICTS = (KEPT, MAPPED, ABSENT, NO_EFFECT, UNKNOWN)
"""Of a flag: metainfer has it, has it otherwise, does not have what it does, needs none; none that
is known here."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_STARTS = {
    VLLM: (("vllm", "serve"), ("-m", "vllm.entrypoints.openai.api_server")),
    SGLANG: (("-m", "sglang.launch_server"), ("sglang", "serve")),
}
_PARTS = {
    "tensor": "ranks of tensor parallelism",
    "replicas": "replicas (data parallelism)",
    "pipeline": "stages of a pipeline",
    "expert": "parts that experts are dealt out to",
    "kv_shards": "ranks that divide caches",
    "chunk": "rows of a step",
    "requests": "requests at once",
    "context_tokens": "the longest context",
    "draft_steps": "tokens drafted before a step",
    "context": "ranks that divide the tokens of a prompt",
}
"""What the number of a flag stands for."""
_CACHES = {
    "auto": RELEASED,
    **dict.fromkeys(("bfloat16", "bf16", "float16"), "bfloat16"),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"), "fp8"),
}
"""Values of --kv-cache-dtype; what engines choose by themselves is what the vendor keeps."""
_CHUNKS = {VLLM: 8192, SGLANG: 8192}
"""Rows of the largest prefill step where the command does not say."""


@dataclass(frozen=True, slots=True)
class KnownFlag:
    """Attributes:
    names: all spellings.
    takes: "value", "many" or "switch".
    verdict: one of `VERDICTS`.
    to: what it is kept or mapped as.
    why: in a few words; "" where `to` says all.
    part: what of the set-up it says, "" for nothing that is predicted.
    """

    names: tuple[str, ...]
    takes: str
    verdict: str
    to: str
    why: str
    part: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the environment: what it does, and what to do about it."""

    name: str
    part: str
    effect: str
    why: str


_SECRET = re.compile(r"(?i)key|token$|secret|password")


@dataclass(frozen=True, slots=True)
class Said:
    """One flag or variable of a command, and what becomes of it; `part`: what of the set-up it
    says, "" for nothing that is predicted."""

    written: str
    verdict: str
    to: str
    why: str
    part: str = ""


@dataclass(frozen=True, slots=True)
class SetUp:
    """What a command starts.

    Attributes:
        engine: "vllm" or "sglang".
        model: as it is named there; "" where it is not.
        layout: of decoding.
        context: parts of a group that share the tokens of a prompt.
        caches: format of latents, as `Formats.latents`; None for one that is not known here.
        chunk_rows, requests, context_tokens: None where the command leaves them to the engine.
        tuned: NCCL's channels are set.
        no_peers: peer access is switched off.
        eager: decoding without graphs.
        drafts: tokens that it drafts before a step; None where it drafts and does not say how
            many.
        visible: its CUDA_VISIBLE_DEVICES; None where it sets none.
        experts: format of routed experts that the checkpoint's name tells, as `Formats.experts`.
        said: each flag and variable, in the command's order.
    """

    engine: str
    model: str
    layout: Layout
    context: int
    caches: str | None
    chunk_rows: int | None
    requests: int | None
    context_tokens: int | None
    tuned: bool
    no_peers: bool
    eager: bool
    drafts: int | None
    visible: str | None
    experts: str
    said: tuple[Said, ...]

    @property
    def layouts(self) -> Layouts:
        """Of both phases. Decoding is taken to divide heads over the whole group."""
        tensor = self.layout.tensor // self.context
        return Layouts(replace(self.layout, tensor=tensor, context=self.context), self.layout)

    @property
    def rows(self) -> int:
        return self.chunk_rows or _CHUNKS[self.engine]


def known_model(named: str) -> str:
    """The known name that a repository or directory of the model has; `named` where none fits."""
    last = PurePosixPath(named).name.lower()
    fitting = [name for name in known_names() if last.startswith(name)]
    return max(fitting, key=len, default=named)


def read_command(text: str) -> SetUp:
    """Of a command or of the file that holds it.

    Raises UserError where no engine is started, for values that are no numbers, and for a file
    that cannot be read or is no command's.
    """
    words = _words(text_of_command(text))
    engine, start = _engine(words)
    values: dict[str, str] = {}
    said = [_variable(word, values) for word in words[:start] if _VARIABLE.match(word)]
    said += _read_flags(engine, words[start:], values)
    return _set_up(engine, values, said)


def _words(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    try:
        words = shlex.split(joined)
    except ValueError as error:
        raise UserError(
            f"the command does not read as a shell's: {str(error).lower()}",
            hint="put the whole command in one pair of quotes, or in a file that --from names",
        ) from error
    return [word for word in words if word not in ("export", "env", "exec", "\\")]


def _engine(words: Sequence[str]) -> tuple[str, int]:
    """Which it starts, and the place of its first argument."""
    for place in range(len(words) - 1):
        first = PurePosixPath(words[place]).name if words[place][:1] != "-" else words[place]
        for engine, starts in _STARTS.items():
            if (first, words[place + 1]) in starts:
                return engine, place + 2
    raise UserError(
        "the command starts neither vLLM nor SGLang",
        hint="such as 'vllm serve MODEL -tp 4', 'python -m sglang.launch_server --model-path M'",
    )


def _read_flags(engine: str, words: Sequence[str], values: dict[str, str]) -> list[Said]:
    known = {name: flag for flag in flags_of_engine(engine) for name in flag.names}
    said: list[Said] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not _is_flag(word):
            said.append(_positional(word, engine, values))
            continue
        name, sign, value = word.partition("=")
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        taken = [value] if sign else []
        if not sign and not (name in known and known[name].takes == "switch"):
            many = name in known and known[name].takes == "many"
            while place < len(words) and not _is_flag(words[place]) and (many or not taken):
                taken.append(words[place])
                place += 1
        if name in ("--model", "--model-path"):
            values["model"] = taken[0] if taken else ""
            said.append(Said(f"{name} {values['model']}", KEPT, "MODEL", "", "model"))
            continue
        written = " ".join([name, *(_shown(name, value) for value in taken)])
        if name not in known:
            said.append(Said(written, UNKNOWN, "", "not a flag that is known here"))
            continue
        flag = known[name]
        if flag.takes != "switch" and not taken:
            raise UserError(
                f"the command gives {name} no value", hint=f"put one behind {name}, or leave it out"
            )
        if flag.part:
            values[flag.part] = taken[0] if taken else "1"
        said.append(Said(written, flag.verdict, flag.to, flag.why, flag.part))
    return said


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-?\d+(\.\d+)?", word)


def _positional(word: str, engine: str, values: dict[str, str]) -> Said:
    if engine == VLLM and "model" not in values:
        values["model"] = word
        return Said(word, KEPT, "MODEL", "", "model")
    return Said(word, UNKNOWN, "", "not part of such a command")


def _variable(word: str, values: dict[str, str]) -> Said:
    name, _, value = word.partition("=")
    for known in variables():
        if known.name == name:
            if known.part:
                values[known.part] = value
            return Said(word, MAPPED, known.effect, known.why, known.part)
    shown = f"{name}={_shown(name, value)}"
    return Said(shown, UNKNOWN, "", "not a variable that is known here")


def _shown(name: str, value: str) -> str:
    """Keys are not repeated: what this makes is printed and kept."""
    return "(not shown)" if _SECRET.search(name) else value


def _set_up(engine: str, values: Mapping[str, str], said: Sequence[Said]) -> SetUp:
    group, context, replicas = _divided(engine, values)
    expert = _number(values, "expert", 1)
    if "expert_all" in values:
        expert = group
    layout = Layout(
        replicas=replicas,
        tensor=group,
        pipeline=_number(values, "pipeline", 1),
        expert=_dividing(expert, group, "expert parts", "--ep-size"),
        kv_shards=_dividing(
            _number(values, "kv_shards", 1),
            group,
            "shards of caches",
            "--decode-context-parallel-size",
        ),
    )
    return SetUp(
        engine=engine,
        model=values.get("model", ""),
        layout=layout,
        context=context,
        caches=_CACHES.get(values.get("caches", "auto")),
        chunk_rows=_optional(values, "chunk"),
        requests=_optional(values, "requests"),
        context_tokens=_optional(values, "context_tokens"),
        tuned=_optional_number(values.get("tuned")) >= 8,
        no_peers=values.get("no_peers", "0") not in ("0", ""),
        eager="eager" in values,
        drafts=_drafts(values),
        visible=values.get("visible"),
        experts=_experts(values.get("model", ""), said),
        said=tuple(said),
    )


def _divided(engine: str, values: Mapping[str, str]) -> tuple[int, int, int]:
    """(ranks of a group, parts that share prompts, replicas). Those parts multiply the ranks of
    vLLM and are of those of SGLang; there data parallel attention makes parts, not replicas."""
    tensor, replicas = _number(values, "tensor", 1), _number(values, "replicas", 1)
    context = _number(values, "context", 1)
    if engine == VLLM:
        return tensor * context, context, replicas
    if "dp_attention" in values:
        context, replicas = context * replicas, 1
    elif "context_all" in values and "context" not in values:
        context = tensor
    return tensor, _dividing(context, tensor, "parts of a prompt", "--attn-cp-size"), replicas


def _experts(model: str, said: Sequence[Said]) -> str:
    told = " ".join([model, *(one.written for one in said if "quantization" in one.written)])
    if any(word in told.lower() for word in ("nvfp4", "modelopt_fp4", "fp4-nv")):
        return "nvfp4"
    return RELEASED


def _dividing(count: int, group: int, what: str, flag: str) -> int:
    if group % count:
        fitting = ", ".join(str(part) for part in range(1, group + 1) if group % part == 0)
        raise UserError(
            f"{count} {what} do not divide {group} ranks", hint=f"give {flag} one of {fitting}"
        )
    return count


def _drafts(values: Mapping[str, str]) -> int | None:
    """Tokens drafted before a step: as the command counts them, 0 where it drafts none."""
    if "speculation" not in values:
        return 0
    if "draft_steps" in values:
        return _optional(values, "draft_steps")
    with suppress(ValueError):
        told = json.loads(values["speculation"])
        if isinstance(told, dict):
            count = told.get("num_speculative_tokens")
            return count if isinstance(count, int) and count > 0 else None
    return None


def _number(values: Mapping[str, str], part: str, default: int) -> int:
    found = _optional(values, part)
    return default if found is None else found


def _optional(values: Mapping[str, str], part: str) -> int | None:
    text = values.get(part)
    if text is None or text in ("auto", "-1"):
        return None
    try:
        number = parse_count(text)
    except ValueError as error:
        raise UserError(
            f"the command gives '{text}' where a number must be",
            hint=f"it stands for {_PARTS.get(part, part)}: give a whole number, such as 8",
        ) from error
    if number < 1:
        raise UserError(
            f"the command gives {number} where at least 1 must be",
            hint=f"it stands for {_PARTS.get(part, part)}; leave it out where there is one",
        )
    return number


def _optional_number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


@cache
def flags_of_engine(engine: str) -> tuple[KnownFlag, ...]:
    rows = json.loads(_FILE.read_text(encoding="utf-8"))["flags"]
    return tuple(
        KnownFlag(
            tuple(row["names"]), row["takes"], row["verdict"], row["to"], row["why"], row["part"]
        )
        for row in rows
        if engine in row["engines"]
    )


@cache
def variables() -> tuple[Variable, ...]:
    rows = json.loads(_FILE.read_text(encoding="utf-8"))["variables"]
    return tuple(Variable(**row) for row in rows)
