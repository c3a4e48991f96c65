"""What whoever runs the server decides about it. No web package is needed to read this."""

from __future__ import annotations

from dataclasses import dataclass


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
        drain_s: how long a stopping server waits for running requests before it ends them.
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    max_choices: int = 128
    ping_s: float = 15.0
    retry_after_s: int = 1
    drain_s: float = 30.0
