"""Recipes for owners of machines: every command is one that this version takes."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from metainfer.cli.main import find_verb, load_verb
from metainfer.cli.verb import parse
from metainfer.core.errors import UserError
from metainfer.hardware.known import machine_of

PAGES = sorted((Path(__file__).parents[2] / "recipes").glob("*.md"))


def commands(text: str) -> list[list[str]]:
    """The words behind `metainfer` of each such line in blocks of code; backslashes join lines."""
    blocks = re.findall(r"^ *```\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in lines]
    return [line[1:] for line in words if line[:1] == ["metainfer"]]


def check(arguments: list[str]) -> None:
    """Raises UserError for a verb, flag, value or recorded machine that does not exist."""
    name, rest = find_verb(arguments)
    parse(load_verb(name), rest, {})
    for flag, value in pairwise(rest):
        if flag == "--machine" and not value.endswith(".json"):
            machine_of(value)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_commands_of_a_recipe_are_taken(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = commands(text)
    assert len(found) >= 4
    for arguments in found:
        check(arguments)
    assert len(text.splitlines()) <= (60 if page.name == "README.md" else 40)


def test_every_recipe_is_in_the_list() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (PAGES[0].parent / "README.md").read_text("utf-8"))
    assert set(listed) == {page.name for page in PAGES} - {"README.md"}


@pytest.mark.parametrize(
    "line", ["plam x", "plan --no-such-flag 1", "plan x --machine nosuch", "plan --objective fast"]
)
def test_a_wrong_command_would_be_found(line: str) -> None:
    (arguments,) = commands(f"```\nmetainfer {line}\n```\n")
    with pytest.raises(UserError):
        check(arguments)
