"""What is wrong with a checkpoint: its files, and its tensors against the Arch's manifest.

Everything is found before a byte of data is read or allocated, and reported together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from metainfer.arch.manifest import MTP_PREFIX, TensorSpec, manifest
from metainfer.arch.record import Arch
from metainfer.core.dtypes import DType
from metainfer.core.errors import CheckpointError
from metainfer.weights.index import CheckpointIndex, TensorEntry

MAX_LISTED = 20

# Formats that a file may use instead of the manifest's, since they say themselves what they are:
# fp8 scales are e8m0 or fp32 (V4-Flash-Base), packed fp4 codes and e8m0 bytes are bytes.
_SAME_BYTES = {
    DType.I8: ("I8", "U8"),
    DType.F8_E8M0: ("F8_E8M0", "U8"),
}
_FP8_SCALES = ("F8_E8M0", "U8", "F32")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `kind`: file, missing, surplus, shape, dtype or value."""

    kind: str
    text: str


def find_problems(index: CheckpointIndex, arch: Arch) -> list[Problem]:
    """All problems of the files in `index` as a checkpoint of `arch`."""
    problems = [Problem("file", text) for text in index.problems]
    specs = manifest(arch)
    for name, spec in specs.items():
        entry = index.entries.get(name)
        if name.startswith(MTP_PREFIX):
            continue  # not used: may be absent, and is not read
        if entry is None:
            problems.append(Problem("missing", f"{name} ({spec.dtype} {list(spec.shape)})"))
            continue
        allowed = _allowed_dtypes(spec, specs)
        if entry.dtype not in allowed:
            problems.append(Problem("dtype", f"{name} is {entry.dtype}, not {spec.dtype}"))
        if entry.shape != spec.shape:
            text = f"{name} is {list(entry.shape)}, not {list(spec.shape)}"
            problems.append(Problem("shape", text))
    for name in index.entries:
        if name not in specs and not name.startswith(MTP_PREFIX):
            problems.append(Problem("surplus", name if name.isprintable() else repr(name)))
    return problems + _mixed_scales(index.entries.values(), specs)


def require_no_problems(directory: Path, arch: Arch, problems: Sequence[Problem]) -> None:
    """Raise a CheckpointError that lists `problems` (at most MAX_LISTED, of every kind some)."""
    if not problems:
        return
    by_kind: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        by_kind[problem.kind].append(problem.text)
    listed = []
    share = max(1, MAX_LISTED // len(by_kind))
    for kind, texts in by_kind.items():
        listed += [f"  {kind}: {text}" for text in texts[:share]]
        if len(texts) > share:
            listed.append(f"  {kind}: and {len(texts) - share} more")
    counts = ", ".join(f"{count} {kind}" for kind, count in _count(problems).items())
    raise CheckpointError(
        f"{directory} is not a usable checkpoint of {arch.name} ({counts}):\n" + "\n".join(listed),
        hint=_hint(by_kind),
    )


def _count(problems: Sequence[Problem]) -> Counter[str]:
    return Counter(problem.kind for problem in problems)


def _hint(by_kind: dict[str, list[str]]) -> str:
    if any(name.startswith("model.") for name in by_kind.get("surplus", ())):
        return (
            "the names are those of transformers' save_pretrained; "
            "metainfer reads the layout of the vendor's release"
        )
    if set(by_kind) == {"dtype"}:
        return "let torch_dtype and quantization_config in config.json say what the files hold"
    if "file" in by_kind:
        return "fetch the files again; `metainfer weights check` reads them all"
    return "check that config.json belongs to these files"


def _allowed_dtypes(spec: TensorSpec, specs: dict[str, TensorSpec]) -> tuple[str, ...]:
    if spec.name.endswith(".scale"):
        weight = specs[spec.name.removesuffix(".scale") + ".weight"]
        if weight.dtype is DType.F8_E4M3:
            return _FP8_SCALES
    return _SAME_BYTES.get(spec.dtype, (spec.dtype.value,))


def _mixed_scales(entries: Iterable[TensorEntry], specs: dict[str, TensorSpec]) -> list[Problem]:
    """Experts of one layer are stacked, so their scales must be of one format."""
    dtypes: dict[str, set[bool]] = defaultdict(set)
    for entry in entries:
        if ".experts." in entry.name and entry.name.endswith(".scale") and entry.name in specs:
            layer = entry.name.split(".experts.")[0]
            dtypes[layer].add(entry.dtype == "F32")
    return [
        Problem("dtype", f"{layer}.experts has both e8m0 and F32 scales")
        for layer, found in dtypes.items()
        if len(found) > 1
    ]
