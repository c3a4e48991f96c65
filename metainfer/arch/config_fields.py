"""ConfigFields: reads a config.json's keys one by one and collects everything that is wrong.

Nothing is raised until `finish`, so that a user sees all missing keys, wrong values and unknown
keys at once, each under the name that the file gives it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from metainfer.core.errors import CheckpointError


class ConfigFields:
    """The keys of one config, each asked for once.

    Args:
        config: canonical key -> value.
        name: what the config is called in messages.
        spelled: canonical key -> the key as the file spells it, where they differ.
    """

    def __init__(
        self, config: Mapping[str, Any], name: str, spelled: Mapping[str, str] | None = None
    ) -> None:
        self._config = config
        self._name = name
        self._spelled = dict(spelled or {})
        self._asked: set[str] = set()
        self._missing: list[str] = []
        self._problems: list[str] = []

    def spell(self, key: str) -> str:
        """The key as the file spells it."""
        return self._spelled.get(key, key)

    @property
    def complete(self) -> bool:
        """No key that was asked for so far is missing or wrong."""
        return not self._missing and not self._problems

    def problem(self, text: str) -> None:
        self._problems.append(text)

    def has(self, key: str) -> bool:
        return key in self._config

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value of an optional key."""
        self._asked.add(key)
        return self._config.get(key, default)

    def integer(self, key: str, *, minimum: int = 1, default: int | None = None) -> int:
        """An integer >= `minimum`; `minimum` itself (a harmless stand-in) where it is wrong."""
        value = self._take(key, default)
        if value is None:
            return minimum
        if type(value) is not int or value < minimum:
            self.problem(f"{self.spell(key)} is {value!r}; it must be an integer >= {minimum}")
            return minimum
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A positive, finite number; 1.0 where it is wrong."""
        value = self._take(key, default)
        if value is None:
            return 1.0
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            self.problem(f"{self.spell(key)} is {value!r}; it must be a positive number")
            return 1.0
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers; empty where it is wrong."""
        value = self._take(key, None)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or any(type(item) is not int for item in value):
            self.problem(f"{self.spell(key)} must be a list of integers")
            return ()
        return tuple(value)

    def expect(self, key: str, allowed: Sequence[Any]) -> None:
        """An optional key of which only `allowed` values are handled; absent means the first."""
        value = self.get(key, allowed[0])
        if not any(type(value) is type(item) and value == item for item in allowed):
            handled = " or ".join(repr(item) for item in allowed)
            self.problem(f"{self.spell(key)} is {value!r}; only {handled} is handled")

    def ignore(self, keys: Sequence[str]) -> None:
        """Keys that cannot change the model's result."""
        self._asked.update(keys)

    def finish(self) -> None:
        """Raise one CheckpointError that names everything that was wrong, unknown or missing."""
        problems = list(self._problems)
        if self._missing:
            problems.insert(0, "missing keys: " + ", ".join(self._missing))
        unknown = sorted(self.spell(key) for key in self._config.keys() - self._asked)
        if unknown:
            problems.append(
                "keys that metainfer does not know and that could change the result: "
                + ", ".join(unknown)
            )
        if problems:
            raise CheckpointError(
                f"the config of {self._name} cannot be used: " + "; ".join(problems),
                hint="use the config.json as the vendor ships it, or a model that is supported",
            )

    def _take(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
            if default is None:
                self._missing.append(self.spell(key))
        return value
