"""Data that ships with the package: the model used where none is named."""

from pathlib import Path

SHIPPED_MODEL = "pebble"


def pebble_dir() -> Path:
    """The directory of the shipped model: config.json, tokenizer and weights."""
    return Path(__file__).parent / SHIPPED_MODEL


def model_dir(named: str | None) -> Path:
    """The directory that `named` means: the shipped model's for none and for its bare name."""
    if not named or (named == SHIPPED_MODEL and not Path(named).exists()):
        return pebble_dir()
    return Path(named)
