"""In which formats the caches keep latents and index keys.

Bytes change what a model predicts, if by little: they are taken where a flag asks for them.
"""

from __future__ import annotations

from metainfer.ops.cache_formats import PLAIN
from metainfer.plan.plan import Origin, Value
from metainfer.plan.settings import EngineSettings


def cache_dtypes(settings: EngineSettings, compute_dtype: str) -> tuple[Value[str], Value[str]]:
    """Of latents with entries, and of index keys; see `ops.cache_formats`."""
    latents, keys = settings.kv_cache_dtype, settings.index_cache_dtype
    if latents is not None:
        kept = Value(latents, Origin.FLAG, "given with --kv-cache-dtype")
    else:
        kept = Value(
            compute_dtype, Origin.DEFAULT, "latents are kept in the format they are computed in"
        )
    if keys is not None:
        return kept, Value(keys, Origin.FLAG, "given with --index-cache-dtype")
    if kept.value in PLAIN:
        return kept, Value(kept.value, Origin.DEFAULT, "index keys are kept as latents are")
    return kept, Value("fp8", Origin.DEFAULT, "index keys are coded where latents are")
