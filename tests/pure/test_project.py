"""The shape of the project: sizes, state, dependencies, links, and what the wheel holds."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from metainfer.core.env import SECRETS, VARIABLES
from metainfer.ops.catalogue import OPS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "metainfer"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").rglob("*.md")]
PAGES += (ROOT / "recipes").glob("*.md")
MOST_LINES = 400


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, object] = tomllib.load(file)["project"]
    return table


def requirements(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", line)[0] for line in lines}


def imported(path: Path) -> Iterator[str]:
    """Top packages that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_a_module_is_short_says_what_it_owns_and_keeps_no_state(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MOST_LINES
    assert not text or ast.get_docstring(tree)
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: a name that changes"
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        assert not reads or path.name == "env.py", "only core/env.py reads the environment"


def test_the_environment_s_table_is_in_order() -> None:
    listed = [variable.name for variable in VARIABLES]
    assert listed == sorted(set(listed))
    assert set(listed) >= SECRETS


SHARED_LIBRARIES = {"nvidia-cuda-nvrtc"}  # loaded by path (`kernels/gpu/program.py`)


def test_every_dependency_is_used_and_explained() -> None:
    table = project()
    base = requirements(table["dependencies"])  # type: ignore[arg-type]
    extras = {
        extra: requirements(lines)
        for extra, lines in table["optional-dependencies"].items()  # type: ignore[attr-defined]
    }
    used = {name.replace("_", "-") for path in MODULES for name in imported(path)}
    asked = base | extras["server"] | extras["bench"] | extras["report"] | extras["kernels"]
    for name in asked - SHARED_LIBRARIES:
        assert name in used, f"nothing imports {name}"

    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    head, *parts = re.split(r"^## (?:Base|Extra `(?=\w+`))", text, flags=re.MULTILINE)
    explained = [set(re.findall(r"^\| ([a-z-]+) \| [^-|]", part, re.MULTILINE)) for part in parts]
    explained = [names_ - {"package"} for names_ in explained]
    assert explained == [base, *extras.values()]
    assert head.startswith("# Dependencies")


def test_every_operation_says_what_it_computes() -> None:
    for op in OPS.values():
        assert "Returns:" in op.doc, op.name
        assert op.cases, op.name


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    broken = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert broken == []


def test_files_named_by_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_0-9]+\.py)`", text))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (PACKAGE / name).is_file()] == []


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, source / "metainfer", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("metainfer/")}
        (entry_points,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "metainfer = metainfer.__main__:entry" in archive.read(entry_points).decode()
    here = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == here
    assert "metainfer/shipped/pebble/config.json" in held
