"""The help of every verb, against tests/golden/help; `pytest --update-golden` writes it anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from metainfer.cli.foreign_flags import FOREIGN_FLAGS
from metainfer.cli.main import VERBS, load_verb
from metainfer.core.config import flags_of
from tests.fakes.command import metainfer

GOLDEN = Path(__file__).parents[1] / "golden" / "help"

# What help must do without, for it to come at once.
HEAVY = (
    "torch", "transformers", "triton", "numpy", "tokenizers", "fastapi", "pydantic", "uvicorn",
    "matplotlib",
)  # fmt: skip


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_the_golden_page(verb: str, pytestconfig: pytest.Config) -> None:
    ran = metainfer(*verb.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    path = GOLDEN / f"{verb.replace(' ', '-') or 'metainfer'}.txt"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(ran.out, encoding="utf-8")
    assert ran.out == path.read_text(encoding="utf-8"), "run pytest with --update-golden"


def test_no_golden_page_is_left_over() -> None:
    pages = {path.stem for path in GOLDEN.iterdir()}
    assert pages == {"metainfer", *(verb.replace(" ", "-") for verb in VERBS)}


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_a_terminal_and_the_list_of_verbs(verb: str) -> None:
    ran = metainfer(*verb.split(), "--help")
    assert max(map(len, ran.out.splitlines())) <= 100
    assert load_verb(verb).summary == VERBS[verb][1]
    assert load_verb(verb).name == verb


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from metainfer.cli.main import VERBS, main\n"
        "from metainfer.cli.terminal import Terminal\n"
        "for verb in VERBS:\n"
        "    assert main([*verb.split(), '--help'], Terminal.standard({}), {}) == 0\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"


def test_foreign_flags_are_not_ours_and_in_order() -> None:
    ours = {
        name
        for verb in VERBS
        for _, record in load_verb(verb).records
        for bound in flags_of(record)
        for name in (bound.flag.name, *bound.flag.aliases)
    }
    assert not ours & set(FOREIGN_FLAGS)
    assert list(FOREIGN_FLAGS) == sorted(FOREIGN_FLAGS)
