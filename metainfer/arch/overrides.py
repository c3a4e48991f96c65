"""Overrides: a config with some of its values replaced, as --hf-overrides asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metainfer.core.errors import UserError

_NUM_LAYERS = ("num_hidden_layers", "n_layers")  # as the release, and the vendor's code, spell it
_PER_LAYER = ("compress_ratios", "layer_types", "mlp_layer_types")
_LEADING = ("num_hash_layers", "n_hash_layers")  # counts of the first layers
_DRAFTING = ("num_nextn_predict_layers", "n_mtp_layers")


def overridden(
    config: Mapping[str, Any], overrides: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """`config` with the values of `overrides`; objects are merged key by key.

    Fewer layers are the first ones of the model: lists with an item per layer are cut to them, and
    drafting blocks, which come after the last layer, are left out.

    Raises UserError where there are no such first layers.
    """
    changed = _merged(config, overrides)
    key = next((key for key in _NUM_LAYERS if key in overrides), None)
    if key is None:
        return changed
    count, before = overrides[key], config.get(key)
    if type(count) is not int or count < 1 or (type(before) is int and count > before):
        raise UserError(
            f"{key} {count!r} is asked of {name}, which has {before}",
            hint="give a whole number from 1 to that",
        )
    if count == before:
        return changed
    for listed in _PER_LAYER:
        if isinstance(changed.get(listed), list) and listed not in overrides:
            changed[listed] = changed[listed][:count]
    for leading in _LEADING:
        if type(changed.get(leading)) is int and leading not in overrides:
            changed[leading] = min(changed[leading], count)
    for drafting in _DRAFTING:
        if drafting in changed and drafting not in overrides:
            changed[drafting] = 0
    return changed


def cuts_layers(overrides: Mapping[str, Any] | None) -> bool:
    """Whether the model may have fewer layers than its files."""
    return any(key in (overrides or {}) for key in _NUM_LAYERS)


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        inner = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        merged[key] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return merged
