"""`metainfer plan validate`: how far predictions lie from what others published."""

from __future__ import annotations

import json
from dataclasses import dataclass

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """What is printed."""

    explain: bool = flag(
        "--explain",
        "Also print the source of each figure, what had to be assumed, and what is not predicted",
        False,
    )
    json: bool = flag("--json", "Print the tables as JSON", False)


def run(terminal: Terminal, options: ValidateOptions) -> int:
    from metainfer.plan.validate import validate
    from metainfer.plan.validate_text import record, text

    with terminal.waiting("predicting every published figure"):
        found = validate()
    if options.json:
        terminal.data(json.dumps(record(found), indent=2))
    else:
        terminal.data(text(found, options.explain))
    return 0


VERB = Verb(
    "plan validate",
    "Set predictions beside published figures",
    (("plan validate", ValidateOptions),),
    run,
    examples=("metainfer plan validate", "metainfer plan validate --explain"),
)
