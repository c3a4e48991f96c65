"""Proof: what `bench quality` found of a model over caches of bytes, and whether it may have them.

A record counts for the checkpoint that was judged, known by its config, by the names and sizes of
its files and by samples of them (a checkpoint that was trained on from it has the same sizes), on
the same kind of device, computed in the same formats, and for nothing else. It is kept under the
home directory of who judged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from metainfer.arch.record import Arch, LayerKind
from metainfer.core.files import replace_file, require_ours
from metainfer.ops.cache_formats import INDEX_DTYPES, LATENT_DTYPES, PLAIN
from metainfer.plan.devices import NATIVE
from metainfer.plan.settings import EngineSettings, LoadFormat
from metainfer.plan.wires import PLAIN as WIRE

LIMITS: Mapping[str, float] = MappingProxyType(
    {"kl": 0.02, "perplexity_rise": 0.01, "top1": 0.97, "recall_loss": 0.02}
)
"""What `bench quality` lets pass where no flag says otherwise. A verdict by laxer limits proves
nothing."""

LEAST_TOKENS = 2048
"""Predicted tokens of text that a verdict must rest on."""

_KEY_DIGITS = 16
_SAMPLES, _SAMPLE_BYTES = 8, 4096  # of each file, evenly, the last at its end
SAME = ("compute_dtype", "activations", "weights_residency")
"""What else changes predictions, of both sides' plans."""


MUCH_LONGER = 4
"""A plan's context over the longest prompt that was judged from which on the plan says so."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Where and how a verdict was found, or an engine computes: rounding differs between others.

    Attributes:
        device: "cpu", or "cuda:sm_90" by compute capability.
        compute_dtype, activations: as a plan calls them.
    """

    device: str
    compute_dtype: str
    activations: str

    def __str__(self) -> str:
        return f"{self.device} in {self.compute_dtype}, activations {self.activations}"


@dataclass(frozen=True, slots=True)
class CacheProof:
    """The model predicts over these caches what it does over plain ones.

    Attributes:
        latents, index_keys: formats, as a plan calls them.
        reason: a sentence's end that says when it was found and how near.
        longest: tokens of the longest prompt that was judged.
    """

    latents: str
    index_keys: str
    reason: str
    longest: int


def default_cache() -> Path:
    return Path.home() / ".cache" / "metainfer" / "quality"


def model_key(directory: Path, settings: EngineSettings) -> str | None:
    """What is known of a checkpoint without reading it whole; None where weights are drawn."""
    config = directory / "config.json"
    if settings.load_format == LoadFormat.DUMMY or not config.is_file():
        return None
    digest = hashlib.sha256(config.read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\0{path.name} {size}".encode())
        with path.open("rb") as file:
            for part in range(1, _SAMPLES + 1):
                file.seek(max(0, size * part // _SAMPLES - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    digest.update(json.dumps(settings.hf_overrides, sort_keys=True).encode())
    return digest.hexdigest()[:_KEY_DIGITS]


def judged(record: Mapping[str, Any], arch: Arch) -> CacheProof | str:
    """What `record` proves if it passed: B keeps bytes, A plain numbers, and all else that changes
    predictions is equal. A string says why it could prove nothing."""
    a, b = (record["sides"][side]["receipt"] for side in ("A", "B"))
    kept_a, kept_b = (
        tuple(side["plan"][name]["value"] for name in ("cache_dtype", "index_cache_dtype"))
        for side in (a, b)
    )
    seen = _all_chosen(arch)
    doubts = {
        "it does not hold caches of bytes against plain ones": not set(kept_a) <= set(PLAIN)
        or set(kept_b) <= set(PLAIN),
        f"there are no caches in {' and '.join(kept_b)}": kept_b[0] not in LATENT_DTYPES
        or kept_b[1] not in INDEX_DTYPES,
        "the two sides differ in wire_dtype too": len(set(wires_of(record))) > 1,
        **doubts_of_any(record, SAME),
        "no needle was looked for, and only they tell of facts far back": not (
            record["needles"]["count"] > 0
        ),
        f"up to {seen} tokens no index key decides anything": kept_b[1] not in PLAIN
        and record["longest"] <= seen,
    }
    for doubt, holds in doubts.items():
        if holds:
            return doubt
    return CacheProof(kept_b[0], kept_b[1], reason_of(record), int(record["longest"]))


def terms_of(record: Mapping[str, Any]) -> Terms:
    """Of both sides. Raises LookupError, TypeError or ValueError where they differ or it does not
    say."""
    a, b = (_terms_of(record, side) for side in ("A", "B"))
    if a != b:
        raise ValueError(f"the sides computed on {a} and {b}")
    return b


def _terms_of(record: Mapping[str, Any], side: str) -> Terms:
    plan = record["sides"][side]["receipt"]["plan"]
    name, _, number = plan["device"]["value"].partition(":")
    if name == "cuda":
        major, minor = record["machine"]["gpus"][int(number or 0)]["capability"]
        code = plan.get("code_for", {"value": NATIVE})["value"]
        name = f"cuda:sm_{major}{minor}" if code == NATIVE else f"cuda:{code}"
    return Terms(name, plan["compute_dtype"]["value"], plan["activations"]["value"])


def too_short(longest: int, max_model_len: int) -> str:
    """In words, where a plan's context is much longer than what was judged; else ""."""
    if max_model_len < MUCH_LONGER * longest:
        return ""
    return (
        f"judged on prompts of up to {longest:,} tokens; this plan's context is {max_model_len:,}"
    )


def wires_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """In which sums of A and of B travelled; records of before there were others do not say."""
    plans = (record["sides"][side]["receipt"]["plan"] for side in ("A", "B"))
    a, b = (plan.get("wire_dtype", {"value": WIRE})["value"] for plan in plans)
    return a, b


def doubts_of_any(record: Mapping[str, Any], same: Sequence[str]) -> dict[str, bool]:
    """Why a record could prove nothing, whatever its sides differ in, and whether that holds.

    Args:
        same: values of plans that must be equal on both sides.
    """
    a, b = (record["sides"][side]["receipt"] for side in ("A", "B"))
    found, limits = record["divergence"], record["verdict"]["thresholds"]
    others = [name for name in same if a["plan"][name]["value"] != b["plan"][name]["value"]]
    lax = [name for name, limit in LIMITS.items() if _is_laxer(name, limits[name], limit)]
    loaded = {side["settings"]["load_format"] for side in (a, b)}
    within = all(
        found[name] >= LIMITS[name] if name == "top1" else found[name] <= LIMITS[name]
        for name in ("kl", "perplexity_rise", "top1")
    )
    return {
        f"the two sides differ in {' and '.join(others)} too": bool(others),
        f"the limits of {' and '.join(lax)} are laxer than usual": bool(lax),
        "its tokens or weights are drawn at random": loaded != {str(LoadFormat.AUTO)}
        or not record["held_out"],
        f"{found['tokens']} predicted tokens are fewer than {LEAST_TOKENS}": not (
            found["tokens"] >= LEAST_TOKENS
        ),
        "it passed with figures that do not pass": record["verdict"]["passed"] is True
        and not within,
        "its date is none": not str(record["date"]).isprintable(),
    }


def reason_of(record: Mapping[str, Any]) -> str:
    """A sentence's end."""
    found = record["divergence"]
    return (
        f"bench quality passed it on {str(record['date'])[:10]}: divergence {found['kl']:.2g} nats"
        f" a token, perplexity {found['perplexity_rise']:+.2%}, up to {record['longest']:,} tokens"
    )


def keep(record: Mapping[str, Any], key: str, cache: Path | None = None) -> Path:
    """Where the record lies from now on."""
    directory = cache or default_cache()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps(record, indent=1)
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = directory / f"{key}-{mark}.json"
    replace_file(path, text.encode())
    return path


def cache_proof(
    directory: Path,
    arch: Arch,
    settings: EngineSettings,
    terms: Terms,
    cache: Path | None = None,
) -> CacheProof | None:
    """Of `cache_proofs` the latest."""
    return next(iter(cache_proofs(directory, arch, settings, terms, cache)), None)


def cache_proofs(
    directory: Path,
    arch: Arch,
    settings: EngineSettings,
    terms: Terms,
    cache: Path | None = None,
) -> tuple[CacheProof, ...]:
    """The latest verdict under `terms` on each pair of formats counts; those that passed, the
    latest first. Files that are no such records count for nothing."""
    key = model_key(directory, settings)
    if key is None:
        return ()
    seen: set[tuple[str, str]] = set()
    passed = []
    for record in latest_first(key, cache or default_cache()):
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            proof = judged(record, arch)
            if isinstance(proof, str) or terms_of(record) != terms:
                continue
            if (proof.latents, proof.index_keys) in seen:
                continue
            seen.add((proof.latents, proof.index_keys))
            if record["verdict"]["passed"] is True:
                passed.append(proof)
    return tuple(passed)


def latest_first(key: str, cache: Path) -> list[dict[str, Any]]:
    """All that was kept of a checkpoint; nothing where others may write."""
    records = []
    with suppress(OSError):
        require_ours(cache)
        for path in cache.glob(f"{key}-*.json"):
            with suppress(OSError, ValueError, RecursionError):
                record = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(record, dict):
                    records.append(record)
    return sorted(records, key=lambda record: str(record.get("date")), reverse=True)


def _is_laxer(name: str, limit: float, usual: float) -> bool:
    return not (limit >= usual if name == "top1" else limit <= usual)  # of no number, too


def _all_chosen(arch: Arch) -> int:
    """Tokens of a sequence all of whose entries are chosen, whatever their keys."""
    ratios = [layer.ratio for layer in arch.layers if layer.kind is LayerKind.COMPRESSED_SPARSE]
    return arch.index_topk * max(ratios) if ratios else 0
