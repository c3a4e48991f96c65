"""`python -m metainfer` is the command `metainfer`."""

import sys
from typing import NoReturn


def entry() -> NoReturn:
    """Run the command, which is imported here so that Ctrl-C ends even that without a traceback."""
    try:
        from metainfer.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main.entry()


if __name__ == "__main__":
    entry()
