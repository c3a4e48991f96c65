"""Files that appear whole: whoever reads one while it is written, or after its writer was killed,
finds what was there before."""

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
