"""Files that are kept between runs: each appears whole (whoever reads one while it is written, or
after its writer was killed, finds what was there before), and nobody else may have written them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in place of what `path` holds; its directory must exist. Nothing is left where
    that fails. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with unfinished.open("xb") as file:
            file.write(data)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def require_ours(folder: Path) -> None:
    """What lies in `folder` runs as this user, or decides what does. Raises PermissionError where
    others may write it, another OSError where it is not there."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} may be written by other users")
