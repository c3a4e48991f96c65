"""`metainfer serve`: a model over the OpenAI API, until it is told to stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer.cli.sampling import MODEL_HELP
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core import log
from metainfer.core.config import flag
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Machine
from metainfer.plan.plan import Plan
from metainfer.plan.settings import EngineSettings
from metainfer.server.settings import LOOPBACK, ServerSettings
from metainfer.shipped import model_dir

if TYPE_CHECKING:
    from metainfer.kernels.registry import Kernel


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is served, and what is logged about it."""

    model: str | None = flag("MODEL", MODEL_HELP, aliases=("--model", "--model-path"))
    served_model_name: tuple[str, ...] = flag(
        "--served-model-name",
        "Names that clients may ask for, the first is the one in answers; the directory's name if"
        " not given",
        (),
        many=True,
    )
    log_level: str = flag(
        "--log-level", "Least serious lines of the log", "info", choices=log.LEVELS,
        env="METAINFER_LOG_LEVEL",
    )  # fmt: skip
    log_json: bool = flag("--log-json", "Log one JSON object per line", False)

    def __post_init__(self) -> None:
        if not all(self.served_model_name):
            raise UserError("--served-model-name is empty")


def run(
    terminal: Terminal, options: ServeOptions, server: ServerSettings, settings: EngineSettings
) -> int:
    try:
        from metainfer.server.app import create_app
        from metainfer.server.run import bind, serve_forever
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("metainfer"):
            raise
        raise UserError(
            f"the server needs the package {error.name}", hint="pip install 'metainfer[server]'"
        ) from error

    log.configure(options.log_level, as_json=options.log_json, stream=terminal.err)
    with closing(bind(server.host, server.port)) as listener:
        # From here on the port is ours, however long loading takes; torch comes after it.
        from metainfer.cli.env import machine_rows
        from metainfer.cli.session import read_text_side
        from metainfer.llm.engine import Engine, model_source
        from metainfer.plan.explain import explain

        def say_plan(machine: Machine, plan: Plan) -> None:
            for label, fact in machine_rows(machine):
                terminal.say(f"{label:<10}{fact}")
            terminal.say(f"\n{explain(plan)}\n")

        directory = model_source(model_dir(options.model), settings)
        tokenizer, defaults = read_text_side(directory, settings)
        with terminal.progress("loading") as progress:
            engine = Engine.load(directory, settings, progress.update, on_plan=say_plan)
        say_kernels(terminal, engine.kernels)
        say_unverified(terminal, engine.machine, engine.plan, engine.kernels)
        with engine:
            names = options.served_model_name or (directory.resolve().name,)
            app = create_app(
                engine,
                tokenizer,
                engine.arch,
                model_names=names,
                settings=server,
                defaults=defaults,
                plan=engine.plan,
            )
            url = url_of(listener.getsockname())
            return serve_forever(
                app, listener, lambda: announce(terminal, url, names, server, directory)
            )


def say_kernels(terminal: Terminal, kernels: Sequence[Kernel]) -> None:
    """One line for each op: the implementation that runs it, in how many layers, and why that one;
    an op whose cases have several has a line for each."""
    counts = Counter((kernel.op, kernel.runs_on) for kernel in kernels)
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for kernel in kernels:
        reasons.setdefault((kernel.op, kernel.runs_on), {})[kernel.why] = None
    wide = max((len(runs_on) for _, runs_on in counts), default=0)
    terminal.say(f"{'operation':<30}  {'runs on':<{wide}}  uses  why")
    for (op, runs_on), uses in sorted(counts.items()):
        first, *others = reasons[op, runs_on]
        more = f", and {len(others)} more" if others else ""
        terminal.say(f"{op:<30}  {runs_on:<{wide}}  {uses:>4}  {first}{more}")
    terminal.say()


def say_unverified(
    terminal: Terminal, machine: Machine, plan: Plan, kernels: Sequence[Kernel]
) -> None:
    """On an accelerator one line where kernels in use never passed `metainfer verify` on this card
    with these versions, or passed in part alone."""
    if plan.device.value == "cpu":
        return
    from metainfer.kernels.verify_known import known, unverified
    from metainfer.kernels.verify_record import card_facts

    done = known(card_facts(machine, "cuda"), plan.plain_cache_dtype)
    left = unverified(kernels, done.passed)
    partly = len(left.keys() & done.partly)
    if left:
        part = f"; {partly} passed in part: not run to the end, or at small sizes" if partly else ""
        terminal.say(
            f"{len(left)} kernels in use never passed `metainfer verify` on this card with these"
            f" versions{part}; it takes about five minutes\n"
        )


def announce(
    terminal: Terminal, url: str, names: Sequence[str], server: ServerSettings, directory: Path
) -> None:
    """What a user needs to know of a server that takes requests."""
    terminal.say(f"serving {directory} as {', '.join(names)}")
    if server.host != LOOPBACK and not server.api_keys:
        terminal.hint("anybody who reaches this address may use it: --api-key asks for a key")
    terminal.say(f"ready on {url}")
    key = " -H 'Authorization: Bearer KEY'" if server.api_keys else ""
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    terminal.say(
        terminal.dim(
            f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
        )
    )


def url_of(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """The URL of a socket's address; any address is reached at the loopback too."""
    host, port = address[:2]
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


VERB = Verb(
    "serve",
    "Serve a model over the OpenAI API",
    (("model", ServeOptions), ("server", ServerSettings), ("engine", EngineSettings)),
    run,
    (
        "metainfer serve",
        "metainfer serve /data/model --port 9000 --max-model-len 32k --served-model-name flash",
    ),
)
