"""What whoever runs the server decides about it. No web package is needed to read this."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.config import flag
from metainfer.core.errors import UserError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and manners of the HTTP side; the engine has its own settings.

    Attributes:
        api_keys: any of these opens everything but /health and /ready; none: no key is asked for.
        cors_origins: origins whose pages may call the API; none by default.
        max_body_bytes: longest request body.
        max_choices: most choices of one call, prompts times n.
        ping_s: seconds of silence after which a stream gets a comment, so that proxies and
            clients keep waiting while a long prompt runs.
        retry_after_s: what a client that is turned away for load is told to wait.
        stall_s: silence after which a client that owes the rest of its request, or does not read
            its answer, is cut off.
        drain_s: how long a stopping server waits for running requests before it ends them.

    Raises UserError naming the flag whose value makes no sense.
    """

    host: str = flag(
        "--host", "Address to listen on; 0.0.0.0 opens the server to the network", LOOPBACK
    )
    port: int = flag("--port", "Port to listen on; 0 takes a free one", 8000)
    api_keys: tuple[str, ...] = flag(
        "--api-key", "Keys of which a client must send one", (), env="METAINFER_API_KEY", many=True
    )
    cors_origins: tuple[str, ...] = flag(
        "--allowed-origins", "Origins whose web pages may call the API", (), unit="url", many=True
    )
    max_body_bytes: int = flag(
        "--max-body-bytes", "Longest request body; longer ones get 413", 32 * 2**20, unit="bytes"
    )
    max_choices: int = flag(
        "--max-choices", "Most answers of one call, prompts times n", 128, unit="n"
    )
    ping_s: float = flag(
        "--ping-interval", "Silence after which a stream gets a comment", 15.0, unit="seconds"
    )
    retry_after_s: int = flag(
        "--retry-after", "What a client is told to wait when the queue is full", 1, unit="seconds"
    )
    stall_s: float = flag(
        "--stall-timeout",
        "How long a client may stand still in the middle of a request or of reading its answer",
        60.0,
        unit="seconds",
    )
    drain_s: float = flag(
        "--shutdown-timeout",
        "How long running requests may take once the server is told to stop",
        30.0,
        unit="seconds",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise UserError(f"--port {self.port} is not between 0 and 65535")
        if not all(self.api_keys):
            raise UserError("--api-key is empty", hint="leave it out to ask for no key")
        for name, value, least in (
            ("--max-body-bytes", self.max_body_bytes, 1),
            ("--max-choices", self.max_choices, 1),
            ("--retry-after", self.retry_after_s, 0),
            ("--shutdown-timeout", self.drain_s, 0),
        ):
            if not least <= value < float("inf"):
                raise UserError(f"{name} {value:g} is not a number of at least {least}")
        for name, seconds in (("--ping-interval", self.ping_s), ("--stall-timeout", self.stall_s)):
            if not seconds > 0:
                raise UserError(f"{name} {seconds:g} is not above 0")
