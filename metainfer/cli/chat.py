"""`metainfer chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from metainfer.cli.run import show
from metainfer.cli.sampling import MODEL_HELP, SamplingOptions
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.core.errors import UserError
from metainfer.core.events import TextDelta
from metainfer.plan.settings import EngineSettings

if TYPE_CHECKING:
    from metainfer.cli.session import Session

HELP = """\
/reset  forget the conversation
/quit   leave (or end of input, or Ctrl-C twice)
/help   this list
Ctrl-C stops an answer. Anything else is said to the model."""
_PROMPT = "> "


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Whom to talk with, and how."""

    model: str | None = flag("MODEL", MODEL_HELP, aliases=("--model", "--model-path"))
    system: str | None = flag("--system", "What the model is told before the conversation")
    thinking: bool | None = flag("--thinking", "Let the model think first; the model's own default")


def run(
    terminal: Terminal, options: ChatOptions, sampling: SamplingOptions, settings: EngineSettings
) -> int:
    if sys.stdin is None:
        raise UserError("stdin is closed", hint="chat reads from it what is said")

    from metainfer.cli.session import open_session

    with open_session(terminal, options.model, settings) as session:
        terminal.say(terminal.dim(HELP))
        Conversation(terminal, session, options, sampling).hold(sys.stdin)
    return 0


class Conversation:
    """Turns of one user and one model.

    Attributes:
        messages: what was said, the system text first if there is one.
    """

    def __init__(
        self, terminal: Terminal, session: Session, options: ChatOptions, sampling: SamplingOptions
    ) -> None:
        self._terminal = terminal
        self._session = session
        self._options = options
        self._sampling = sampling
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        system = self._options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def hold(self, source: TextIO) -> None:
        """Read lines and answer them until the user leaves. Raises KeyboardInterrupt at the second
        Ctrl-C with nothing said between."""
        interrupted = False
        while True:
            try:
                line = self._read(source)
                interrupted = False
                if line is None or not self.take(line):
                    return
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self._terminal.say("\n(Ctrl-C again, or /quit, to leave)")

    def take(self, line: str) -> bool:
        """Do what one line says. False: the user leaves."""
        command = line.strip()
        if command == "/quit":
            return False
        if command == "/reset":
            self.reset()
            self._terminal.say("(the conversation is forgotten)")
        elif command == "/help":
            self._terminal.say(HELP)
        elif command.startswith("/"):
            self._terminal.say(f"(there is no {command.split()[0]}; /help lists what there is)")
        elif command:
            self._answer(line.rstrip("\n"))
        return True

    def _answer(self, said: str) -> None:
        """One turn. What was said before an interruption stays said; a turn that cannot be served
        was not."""
        self.messages.append({"role": "user", "content": said})
        text = ""
        try:
            asked = self._session.chat_prompt(self.messages, self._options.thinking)
            with closing(self._session.answer(asked, self._sampling)) as events:
                for event in events:
                    show(self._terminal, event)
                    if isinstance(event, TextDelta):
                        text += event.text
            self._terminal.data("")
        except UserError as error:
            self._terminal.error(error)
        finally:
            if text:
                self.messages.append({"role": "assistant", "content": text})
            else:
                self.messages.pop()

    def _read(self, source: TextIO) -> str | None:
        """The next line, None at the end of input."""
        if not source.isatty():
            try:
                return source.readline() or None
            except UnicodeDecodeError as error:
                raise UserError(f"stdin is not UTF-8: {error.reason}") from error
        import readline  # noqa: F401  # gives `input` a history and editing keys

        try:
            return input(_PROMPT)
        except EOFError:
            return None


VERB = Verb(
    "chat",
    "Talk with a model in the terminal",
    (("conversation", ChatOptions), ("sampling", SamplingOptions), ("engine", EngineSettings)),
    run,
    ("metainfer chat", 'metainfer chat /data/model --system "Answer briefly." --temperature 0.6'),
)
