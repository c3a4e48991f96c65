"""From a directory, a config.json or a known name to the Arch record."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from metainfer.arch import deepseek_v4
from metainfer.arch.attention import AttentionSide
from metainfer.arch.attention_sides import ATTENTION_ONLY, of_v4
from metainfer.arch.overrides import overridden
from metainfer.arch.record import Arch
from metainfer.arch.spelling import released_spelling
from metainfer.core.errors import CheckpointError, UserError
from metainfer.shipped import SHIPPED_MODEL, pebble_dir

_PARSERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, str], str], Arch]] = {
    deepseek_v4.FAMILY: deepseek_v4.parse,
}
_KNOWN_DIRECTORY = Path(__file__).parent / "known"
_MAX_CONFIG_BYTES = 16 * 2**20


def known_names() -> tuple[str, ...]:
    """Names of models that can be given in place of a path; some are not served yet."""
    return (SHIPPED_MODEL, *sorted(path.stem for path in _KNOWN_DIRECTORY.glob("*.json")))


def read_arch(path_or_name: str | Path, overrides: Mapping[str, Any] | None = None) -> Arch:
    """The Arch of a checkpoint directory, a config.json file, or a known name.

    Args:
        overrides: values of the config to replace, as `arch.overrides.overridden` does it.

    Raises:
        UserError: there is no such path or name.
        CheckpointError: the config is not readable JSON, or not handled; every key at fault is
            named at once.
    """
    _, name = _locate(path_or_name)
    return arch_from_config(config_of(path_or_name, overrides), name)


def config_of(
    path_or_name: str | Path, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config that `read_arch` reads, in the file's own spelling.

    Raises UserError, CheckpointError: as `read_arch`.
    """
    path, name = _locate(path_or_name)
    return overridden(read_config(path), overrides or {}, name)


def read_attention(path_or_name: str | Path) -> AttentionSide:
    """The attention side of a checkpoint directory, a config.json file, or a known name, also of
    models that are not served yet.

    Raises:
        UserError, CheckpointError: as `read_arch`.
    """
    path, name = _locate(path_or_name)
    config = read_config(path)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in ATTENTION_ONLY:
        return ATTENTION_ONLY[model_type](config, name)
    return of_v4(arch_from_config(config, name))


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} is larger than any config ({_MAX_CONFIG_BYTES} bytes)")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON: {error}", hint="fetch the file again"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a JSON {type(config).__name__}, not an object")
    return config


def arch_from_config(config: Mapping[str, Any], name: str) -> Arch:
    """The Arch of a config; `name` is what the model is called.

    Raises:
        CheckpointError: unknown model_type, or keys that are missing, unknown or not handled.
    """
    canonical, spelled = released_spelling(config, name)
    model_type = canonical.get("model_type")
    if model_type is None and "dim" in config and "compress_ratios" in config:
        model_type = deepseek_v4.FAMILY  # the vendor's inference config has no model_type
    parser = _PARSERS.get(model_type) if isinstance(model_type, str) else None
    if isinstance(model_type, str) and model_type in ATTENTION_ONLY:
        raise CheckpointError(
            f"{name} (model_type {model_type}) is not served yet: the kernels of its attention are"
            " here, the model is not",
            hint="`metainfer kernels coverage --part attention` takes its name or config",
        )
    if parser is None:
        raise CheckpointError(
            f"the config of {name} has model_type {model_type!r}, which metainfer does not serve",
            hint=f"supported model types: {', '.join(_PARSERS)}",
        )
    return parser(canonical, spelled, name)


def _locate(path_or_name: str | Path) -> tuple[Path, str]:
    """The config file, and the model's name."""
    path = Path(path_or_name)
    # Unlike Path, os.path takes a name that no file can have (a prompt, say) as one not there.
    if not os.path.exists(path) and str(path_or_name) in known_names():
        if str(path_or_name) == SHIPPED_MODEL:
            return pebble_dir() / "config.json", SHIPPED_MODEL
        known = _KNOWN_DIRECTORY / f"{path_or_name}.json"
        return known, known.stem
    if os.path.isdir(path):
        config = path / "config.json"
        if not os.path.isfile(config):
            raise CheckpointError(
                f"{path} has no config.json", hint="give the directory of a whole checkpoint"
            )
        return config, path.resolve().name
    if os.path.isfile(path):
        return path, path.resolve().parent.name if path.name == "config.json" else path.stem
    raise UserError(
        f"there is no model at {str(path_or_name)!r}",
        hint=f"give a checkpoint directory, or one of the known names: {', '.join(known_names())}",
    )
