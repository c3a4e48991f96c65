"""Defaults that a model's `generation_config.json` gives to requests that leave them open."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.core.errors import CheckpointError

GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Sampling defaults, and whether the model thinks when a request does not say.

    `thinking` is metainfer's own key, for models of a thinking family that were not taught to;
    the vendor's models do not have it and think by default, as in vLLM.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    thinking: bool = True

    @classmethod
    def load(cls, directory: str | Path) -> GenerationConfig:
        """Read a model directory; without the file, OpenAI's defaults hold.

        Keys about other things (such as `transformers_version`, or `do_sample`, which vLLM passes
        over too) are left alone. Raises CheckpointError naming a value of the wrong type.
        """
        file = Path(directory) / GENERATION_CONFIG_FILE
        if not file.is_file():
            return cls()
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise CheckpointError(f"{file} does not hold a JSON object")
        values: dict[str, Any] = {}
        for name, kinds in _KINDS.items():
            value = record.get(name)
            if value is None:
                continue
            if type(value) not in kinds:
                raise CheckpointError(f"{file}: {name} is {value!r}, not {kinds[-1].__name__}")
            values[name] = value
        return cls(**values)


_KINDS: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "thinking": (bool,),
}
