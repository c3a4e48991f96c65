"""In which formats the caches keep latents and index keys.

Bytes change what a model predicts, if by little: they are taken where a flag asks for them, or
where `bench quality` found that this model does not mind.
"""

from __future__ import annotations

from metainfer.ops.cache_formats import CODED_KEYS, PLAIN
from metainfer.ops.kernel_order import COMPOSED
from metainfer.plan.plan import Origin, Value
from metainfer.plan.proof import CacheProof
from metainfer.plan.settings import EngineSettings


def cache_dtypes(
    settings: EngineSettings, compute_dtype: str, proof: CacheProof | None = None
) -> tuple[Value[str], Value[str]]:
    """Of latents with entries, and of index keys; see `ops.cache_formats`."""
    if COMPOSED in (settings.kernel_order or ""):
        proof = None  # it reads plain numbers alone
    kept = _latents(settings, compute_dtype, proof)
    if settings.index_cache_dtype is not None:
        given = settings.index_cache_dtype
        return kept, Value(given, Origin.FLAG, "given with --index-cache-dtype")
    if proof is not None and kept.value == proof.latents:
        return kept, Value(proof.index_keys, Origin.MEASURED, proof.reason)
    if kept.value in PLAIN:
        return kept, Value(kept.value, Origin.DEFAULT, "index keys are kept as latents are")
    return kept, Value(CODED_KEYS, Origin.DEFAULT, "index keys are coded where latents are")


def _latents(settings: EngineSettings, compute_dtype: str, proof: CacheProof | None) -> Value[str]:
    if settings.kv_cache_dtype is not None:
        return Value(settings.kv_cache_dtype, Origin.FLAG, "given with --kv-cache-dtype")
    if proof is not None and settings.index_cache_dtype in (None, proof.index_keys):
        return Value(proof.latents, Origin.MEASURED, proof.reason)
    return Value(
        compute_dtype,
        Origin.DEFAULT,
        "the format they are computed in; no record of bench quality allows fewer bytes",
    )
