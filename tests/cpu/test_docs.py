"""Reference pages: made from the code, and found out when they are not current."""

from __future__ import annotations

from pathlib import Path

import pytest

from metainfer.cli import docs
from metainfer.core.env import VARIABLES
from metainfer.ops.catalogue import OPS


def test_pages_are_written_then_current_then_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "_DIRECTORY", tmp_path / "reference")
    assert docs.main(["--check"]) == 1
    assert not (tmp_path / "reference").exists()
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    (tmp_path / "reference" / "ops.md").write_text("old", encoding="utf-8")
    capsys.readouterr()
    assert docs.main(["--check"]) == 1
    assert capsys.readouterr().err == "not current in docs/reference: ops.md; run `make docs`\n"


def test_nothing_is_left_out() -> None:
    assert all(f"\n## {name}\n" in docs.ops_page() for name in OPS)
    assert all(f"| `{variable.name}` |" in docs.environment_page() for variable in VARIABLES)


def test_tables_survive_bars_in_cells() -> None:
    page = docs._table(("a", "b"), [("x|y", "z")])
    assert page[-1] == r"| x\|y | z |"
