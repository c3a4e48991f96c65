"""`metainfer bench plot`: the records of `bench model` and `bench serve` as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import REQUIRED, flag
from metainfer.core.errors import UserError

_FORMATS = ("svg", "png")


@dataclass(frozen=True, slots=True)
class PlotOptions:
    """What is drawn, and where to."""

    records: tuple[Path, ...] = flag(
        "RECORD",
        "JSON records, all of `bench model` or all of `bench serve`; several of `bench serve` also"
        " give throughput against the time to the first token",
        REQUIRED,
        many=True,
    )
    out: Path | None = flag(
        "--out", "The picture, .svg or .png; if not given, the first record's name with .svg"
    )

    @property
    def path(self) -> Path:
        first = self.records[0]
        return self.out or first.parent / f"{first.stem}.svg"


def run(terminal: Terminal, options: PlotOptions) -> int:
    from importlib.util import find_spec

    from metainfer.bench.plot_records import read_records, without_requests

    path, ending = options.path, options.path.suffix.lower().removeprefix(".")
    if path.is_dir():
        raise UserError(f"{path} is a directory", hint="name a file in it, ending in .svg or .png")
    if ending not in _FORMATS:
        raise UserError(
            f"--out {path}: the ending says the format, and is none of .{', .'.join(_FORMATS)}",
            hint=f"--out {path.with_suffix('.svg')}",
        )
    if path.resolve() in [record.resolve() for record in options.records]:
        raise UserError(f"{path} is the record itself", hint="give the picture a name with --out")
    records = read_records(options.records)
    if find_spec("matplotlib") is None:
        raise UserError(
            "matplotlib, which draws, is not installed", hint="pip install 'metainfer[report]'"
        )
    from metainfer.bench.plot import draw
    from metainfer.bench.record import write_whole

    if missing := without_requests(records):
        terminal.say(f"no distributions of {', '.join(missing)}: measured without --save-detailed")
    picture = draw(records, ending)
    try:
        write_whole(path, picture)
    except OSError as error:
        raise UserError(
            f"{path}: {(error.strerror or str(error)).lower()}",
            hint="nothing was written; name another place with --out",
        ) from error
    terminal.data(str(path))
    return 0


VERB = Verb(
    "bench plot",
    "Draw records of bench serve or bench model",
    (("what is drawn", PlotOptions),),
    run,
    (
        "metainfer bench plot bench-model.json",
        "metainfer bench plot rate-1.json rate-4.json rate-16.json --out rates.svg",
    ),
)
