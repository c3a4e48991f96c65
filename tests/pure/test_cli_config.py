"""Flags from record fields: parsing, precedence, help."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.config import REQUIRED, add_flags, flag, help_rows, parse_count, read_flags
from metainfer.core.errors import UserError


@dataclass(frozen=True)
class Sample:
    model: str | None = flag("MODEL", "The model", aliases=("--model", "--model-path"))
    length: int | None = flag("--length", "A length", unit="tokens", aliases=("--len",))
    kind: str | None = flag("--kind", "A kind", choices=("red", "blue"))
    rate: float = flag("--rate", "A rate", 1.5)
    verbose: bool = flag("--verbose", "Say more", False)
    cache: bool = flag("--cache", "Keep things", True)
    names: tuple[str, ...] = flag("--names", "Names", ("a", "b"), many=True)
    key: str | None = flag("--key", "A key", env="METAINFER_API_KEY")
    hidden: int = 3  # a field without a flag


def read(*arguments: str, **environment: str) -> Sample:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser, Sample)
    return read_flags(parser.parse_args(arguments), Sample, environment)


def test_nothing_given_leaves_the_defaults() -> None:
    assert read() == Sample(None, None, None, 1.5, False, True, ("a", "b"), None, 3)


@pytest.mark.parametrize("arguments", [("",), ("--model", ""), ("--model=",)])
def test_an_empty_name_does_not_stand_for_the_default(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="MODEL is empty"):
        read(*arguments)


def test_each_kind_of_flag_is_read() -> None:
    sample = read(
        *("here", "--len", "32k", "--kind", "blue", "--rate", "inf", "--verbose"),
        *("--no-cache", "--names", "x", "y", "z"),
    )
    assert sample == Sample("here", 32_000, "blue", float("inf"), True, False, ("x", "y", "z"))


@pytest.mark.parametrize(
    "arguments", [("here",), ("--model", "here"), ("--model-path", "here"), ("--rate", "2", "here")]
)
def test_the_positional_is_also_an_option(arguments: tuple[str, ...]) -> None:
    assert read(*arguments).model == "here"


def test_a_positional_that_must_be_given_and_is_parsed() -> None:
    @dataclass(frozen=True)
    class Target:
        path: Path = flag("PATH", "Where to", REQUIRED)

    parser = argparse.ArgumentParser()
    add_flags(parser, Target)
    assert read_flags(parser.parse_args(["here"]), Target, {}) == Target(Path("here"))
    with pytest.raises(UserError, match="PATH is not given"):
        read_flags(parser.parse_args([]), Target, {})
    assert [written for written, _ in help_rows(Target)] == ["PATH"]


def test_auto_leaves_a_value_to_the_plan() -> None:
    sample = read("--length", "auto", "--kind", "auto")
    assert sample.length is None
    assert sample.kind is None


def test_a_flag_wins_over_its_variable_and_the_variable_over_the_default() -> None:
    assert read(METAINFER_API_KEY="from-env").key == "from-env"
    assert read("--key", "from-flag", METAINFER_API_KEY="from-env").key == "from-flag"


def test_a_variable_that_does_not_parse_is_named() -> None:
    @dataclass(frozen=True)
    class Counted:
        count: int = flag("--count", "A count", 1, env="COUNT")

    parser = argparse.ArgumentParser()
    add_flags(parser, Counted)
    with pytest.raises(UserError, match="environment variable COUNT: 'many' is not a whole number"):
        read_flags(parser.parse_args([]), Counted, {"COUNT": "many"})


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-1", -1), ("32k", 32_000), ("32K", 32_768), ("1.5k", 1_500), ("2M", 2 << 20),
     ("1_000", 1_000), ("1m", 10**6), ("1g", 10**9), ("0.5K", 512)],
)  # fmt: skip
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@given(st.integers(min_value=0, max_value=10**18))
def test_a_point_costs_no_accuracy(value: int) -> None:
    assert parse_count(f"{value}.0") == value
    assert parse_count(f"{value // 1000}.{value % 1000:03}k") == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "1kk", "0x10", "1e3", "١٢x", "nan"])
def test_what_is_not_a_count(text: str) -> None:
    with pytest.raises(ValueError):
        parse_count(text)


@given(st.integers(min_value=-(10**12), max_value=10**12))
def test_every_plain_integer_is_itself(value: int) -> None:
    assert parse_count(str(value)) == value


def test_help_shows_form_default_alias_and_variable() -> None:
    assert dict(help_rows(Sample)) == {
        "[MODEL]": "The model (also --model, --model-path)",
        "--length TOKENS": "A length (also --len)",
        "--kind red|blue": "A kind",
        "--rate X": "A rate (default 1.5)",
        "--verbose": "Say more",
        "--cache, --no-cache": "Keep things (default on)",
        "--names TEXT ...": "Names (default a b)",
        "--key TEXT": "A key (or METAINFER_API_KEY)",
    }
