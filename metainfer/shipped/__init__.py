"""Data that ships with the package: the model used where none is named."""

from pathlib import Path

SHIPPED_MODEL = "pebble"


def pebble_dir() -> Path:
    """The directory of the shipped model: config.json, tokenizer and weights."""
    return Path(__file__).parent / SHIPPED_MODEL
