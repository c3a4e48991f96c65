"""The real server on a free port of the loopback, in a thread, over whatever engine a test has."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from fastapi import FastAPI

from metainfer.arch.tiny import tiny_arch
from metainfer.llm.client import EngineClient
from metainfer.llm.request import Request
from metainfer.server.app import create_app
from metainfer.server.run import bind, serve_forever
from metainfer.server.service import Service
from metainfer.server.settings import LOOPBACK, ServerSettings
from metainfer.text.generation_config import GenerationConfig
from metainfer.text.tokenizer import Tokenizer
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.tiny_tokenizer import tiny_tokenizer

MODEL = "tiny"
VOCAB = 512


@dataclass(frozen=True)
class Served:
    """A running server: where it is, and what is behind it."""

    url: str
    app: FastAPI
    service: Service

    def openai(self, key: str = "any") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def http(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **more)


@contextmanager
def serving(
    client: EngineClient,
    tokenizer: Tokenizer,
    settings: ServerSettings | None = None,
    send_bytes: int | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server until the block ends. `options` go to `create_app`.

    `send_bytes` bounds what the system buffers for clients that do not read.
    """
    options.setdefault("model_names", (MODEL,))
    options.setdefault("defaults", GenerationConfig(thinking=False))
    arch = options.pop("arch", None) or tiny_arch(vocab_size=VOCAB)
    app = create_app(client, tokenizer, arch, settings=settings, **options)
    listener = bind(LOOPBACK, 0)
    if send_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    started = threading.Event()
    thread = threading.Thread(target=serve_forever, args=(app, listener, started.set))
    thread.start()
    try:
        assert started.wait(30), "the server does not start"
        yield Served(url, app, app.state.service)
    finally:
        app.state.stop()
        thread.join()


class Script:
    """What a `FakeEngine` says: `says` whatever is asked, or what `answer` makes of a request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.says = "Hello there."
        self.answer: Callable[[Request], Sequence[int]] | None = None

    def __call__(self, request: Request) -> Sequence[int]:
        if self.answer is not None:
            return self.answer(request)
        return self._tokenizer.encode(self.says)


@dataclass(frozen=True)
class Bench:
    """A server over a scripted engine."""

    served: Served
    engine: FakeEngine
    script: Script
    tokenizer: Tokenizer

    @property
    def last(self) -> Request:
        """The request that the engine got last."""
        return self.engine.submitted[-1]


@contextmanager
def scripted(
    directory: Path, settings: ServerSettings | None = None, **options: Any
) -> Iterator[Bench]:
    """A server over a scripted engine, with a tokenizer made in `directory`."""
    tokenizer = tiny_tokenizer(directory, VOCAB)
    script = Script(tokenizer)
    with FakeEngine(script) as engine, serving(engine, tokenizer, settings, **options) as served:
        yield Bench(served, engine, script, tokenizer)


def wait_for(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something holds; fail if it never does."""
    deadline_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline_s, "it does not come to pass"
        time.sleep(0.005)


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error in an answer, in OpenAI's form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return error
