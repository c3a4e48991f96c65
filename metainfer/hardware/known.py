"""Machines by name: recorded ones ship with the package, others come from a file or the probe.

Of several curves of a recorded machine with the same means, operation and GPUs the first fits it
best; the others are of sites or settings that differ.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from metainfer.core.errors import UserError
from metainfer.hardware.machine import Machine
from metainfer.hardware.measured import with_measured
from metainfer.hardware.probe import probe

_FOLDER = Path(__file__).parent / "machines"
_MOST_BYTES = 16 * 10**6
"""Of a record; one of 64 GPUs with all curves has under a tenth of it."""
_SHOWN = 200
"""Characters of what was given, in a sentence."""


def machine_names() -> tuple[str, ...]:
    """Of the recorded machines, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def machine_of(text: str | None) -> Machine:
    """The machine that `--machine` means.

    Args:
        text: name of a recorded machine, else path of a record; None for the one at hand, with
            what `metainfer probe --measure` found of it.

    Raises UserError naming what is neither.
    """
    if text is None:
        return with_measured(probe())
    if text in machine_names():
        return Machine.from_json((_FOLDER / f"{text}.json").read_text(encoding="utf-8"))
    path = Path(text)
    if not _is_file(path):
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise UserError(
            f"--machine: '{shown}' is no file and no recorded machine", hint=_near(text)
        )
    read = _read(path)
    try:
        return Machine.from_json(read.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: the machine is not a JSON record", hint="it is not text"
        ) from error
    except UserError as error:
        raise UserError(f"{path}: {error.message}", hint=error.hint) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # such as a name that is too long for one
        return False


def _read(path: Path) -> bytes:
    """Raises UserError naming what cannot be read, or is too long; some files have no size."""
    try:
        with path.open("rb") as file:
            read = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"--machine: {path} cannot be read: {error.strerror}") from error
    if len(read) > _MOST_BYTES:
        raise UserError(
            f"{path}: the machine is not a JSON record",
            hint=f"it has more than {_MOST_BYTES / 1e6:.0f} MB",
        )
    return read


def _near(text: str) -> str:
    names = machine_names()
    near = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{meant}`metainfer probe --out FILE` writes a record; recorded are {', '.join(names)}"
