"""The command `metainfer`: finds the verb, runs it, turns errors into sentences and exit codes.

Exit codes: 0 done, 1 a check or measurement failed, 2 the user can mend it, 70 a bug in metainfer,
130 interrupted, 141 the reader of stdout went away, 143 terminated. Nothing heavy is imported
before a verb runs.
"""

from __future__ import annotations

import difflib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import NoReturn

from metainfer.cli.interrupts import Terminated, handle_signals, let_signals_end
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb, asks_for_help, help_text, parse
from metainfer.core.env import bound_spinning, read_environment
from metainfer.core.errors import UserError

EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143

VERBS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "serve": ("metainfer.cli.serve", "Serve a model over the OpenAI API"),
        "run": ("metainfer.cli.run", "Answer one prompt and stop"),
        "chat": ("metainfer.cli.chat", "Talk with a model in the terminal"),
        "env": ("metainfer.cli.env", "Report on machine, versions and plan, to paste"),
        "plan": ("metainfer.cli.plan", "Find the layout that suits a machine and a workload"),
        "doctor": (
            "metainfer.cli.doctor",
            "Say what slows or breaks serving on this machine, and how to mend it",
        ),
        "plan validate": (
            "metainfer.cli.plan_validate",
            "Set predictions beside published figures",
        ),
        "probe": ("metainfer.cli.probe", "Look at this machine: GPUs, links, pairs, host"),
        "commission": (
            "metainfer.cli.commission",
            "Probe, plan, verify, tune and measure in one run, into one file",
        ),
        "verify": ("metainfer.cli.verify", "Check every operation of a model on this card"),
        "profile": ("metainfer.cli.profile", "Say where the time of a step goes, by operation"),
        "bench serve": ("metainfer.cli.bench_serve", "Put load on a server and measure it"),
        "bench model": ("metainfer.cli.bench_model", "Measure this engine against transformers"),
        "bench stages": (
            "metainfer.cli.bench_stages",
            "Measure generic, adapted and tuned settings in one run",
        ),
        "bench paired": (
            "metainfer.cli.bench_paired",
            "Measure the effect of one setting against another",
        ),
        "bench quality": (
            "metainfer.cli.bench_quality",
            "Judge whether one setting predicts what another does",
        ),
        "bench ops": ("metainfer.cli.bench_ops", "Measure each operation against its floor"),
        "bench comm": (
            "metainfer.cli.bench_comm",
            "Measure every way for ranks to talk to each other",
        ),
        "bench plot": ("metainfer.cli.bench_plot", "Draw records of bench serve or bench model"),
        "kernels list": (
            "metainfer.cli.kernels_list",
            "List what runs each operation, by kind of card",
        ),
        "kernels explain": (
            "metainfer.cli.kernels_explain",
            "Say what runs an operation, and why nothing better",
        ),
        "kernels coverage": (
            "metainfer.cli.kernels_coverage",
            "Prove by compiling what a model's operations run on",
        ),
        "kernels tune": (
            "metainfer.cli.kernels_tune",
            "Find and keep what runs each operation fastest on this card",
        ),
        "weights synth": ("metainfer.cli.weights_synth", "Write a random checkpoint of a model"),
        "weights check": ("metainfer.cli.weights_check", "Check a checkpoint without loading it"),
        "version": ("metainfer.cli.version", "Print the version"),
    }
)
"""Name of each verb, its module (which has a `VERB`), its summary."""


def entry() -> NoReturn:
    """The console script."""
    handle_signals()
    bound_spinning()
    environment = read_environment()
    terminal = Terminal.standard(environment)
    finish(lambda: _dispatch(sys.argv[1:], terminal, environment), terminal)


def finish(run: Callable[[], int], terminal: Terminal) -> NoReturn:
    """End this process with what `run` returns, or with the exit code of what it raises."""
    try:
        code = guarded(run, terminal)
        terminal.out.flush()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Terminated:
        code = EXIT_TERMINATED
    except BrokenPipeError:
        # What is still buffered can go nowhere: let the interpreter's own flush at exit succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal.out.fileno())
        code = EXIT_BROKEN_PIPE
    # From here a second Ctrl-C ends the process without a traceback.
    let_signals_end()
    if threading.active_count() > 1:
        # Interrupted while a thread loads or computes: native code of such a thread aborts the
        # process if the interpreter is taken down around it.
        terminal.err.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str], terminal: Terminal, environment: Mapping[str, str]) -> int:
    """Run one command line and return its exit code; only interruptions are raised."""
    return guarded(lambda: _dispatch(arguments, terminal, environment), terminal)


def guarded(run: Callable[[], int], terminal: Terminal) -> int:
    """What `run` returns; errors become sentences and exit codes."""
    try:
        return run()
    except UserError as error:
        terminal.error(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        terminal.error(sentence_of_os_error(error))
    except Exception as error:
        if _wants_memory(error):
            terminal.error(_no_memory(error))
            return UserError.exit_code
        # A bug: the traceback is what its report needs.
        traceback.print_exc(file=terminal.err)
        terminal.hint("this is a bug in metainfer; report it with the output of `metainfer env`")
        return EXIT_BUG
    return UserError.exit_code


def _wants_memory(error: Exception) -> bool:
    """Whether memory did not suffice, as Python says it, or torch (which is not imported here)."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "t allocate memory" in str(error)
    )


def _no_memory(error: Exception) -> UserError:
    said = str(error).strip().splitlines()
    return UserError(
        f"memory did not suffice: {said[0] if said else 'the system gave no more'}",
        hint="where more is free, `ulimit -v` or a container may bound it",
    )


def _dispatch(arguments: Sequence[str], terminal: Terminal, environment: Mapping[str, str]) -> int:
    if not arguments:
        terminal.say(overview())
        return UserError.exit_code
    if arguments[0] in ("-h", "--help", "help"):
        terminal.data(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        arguments = ["version", *arguments[1:]]
    alone = arguments[0] in VERBS
    if not alone and asks_for_help(arguments[1:2]) and (group := verbs_of(arguments[0])):
        terminal.data("\n".join(_listed(group)))
        return 0
    name, rest = find_verb(arguments)
    verb = load_verb(name)
    if asks_for_help(rest):
        terminal.data(help_text(verb))
        return 0
    return verb.run(terminal, *parse(verb, rest, environment))


def find_verb(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The verb's full name and the arguments behind it. Raises UserError with the nearest name."""
    for length in (2, 1):
        name = " ".join(arguments[:length])
        if name in VERBS:
            return name, arguments[length:]
    group = verbs_of(arguments[0])
    if group and len(arguments) == 1:
        raise UserError(f"metainfer {arguments[0]} needs one of: {', '.join(group)}")
    asked = " ".join(arguments[:2]) if group else arguments[0]
    near = difflib.get_close_matches(asked, VERBS, n=1, cutoff=0.5)
    hint = f"did you mean `metainfer {near[0]}`? " if near else ""
    raise UserError(f"there is no verb '{asked}'", hint=f"{hint}metainfer --help lists all verbs")


def verbs_of(group: str) -> list[str]:
    """The verbs of two words that begin with `group`."""
    return [name for name in VERBS if name.startswith(f"{group} ")]


def load_verb(name: str) -> Verb:
    """Import the module of one verb."""
    verb = import_module(VERBS[name][0]).VERB
    assert isinstance(verb, Verb)
    return verb


def overview() -> str:
    """The page that `metainfer --help` prints."""
    lines = [
        "usage: metainfer VERB [flags]",
        "",
        "Mixture-of-experts inference for machines whose GPUs are linked by PCIe alone.",
        "",
        "verbs:",
        *_listed(list(VERBS)),
        "",
        "`metainfer VERB --help` describes the flags of a verb. Without MODEL, verbs use the",
        "model that ships with the package.",
    ]
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> list[str]:
    width = max(map(len, names))
    return [f"  {name.ljust(width)}  {VERBS[name][1]}" for name in names]


def sentence_of_os_error(error: OSError) -> UserError:
    """What the operating system refused, as a sentence."""
    reason = (error.strerror or str(error)).lower()
    if error.filename is None:
        return UserError(f"the operating system refused: {reason}")
    return UserError(f"{error.filename}: {reason}")
