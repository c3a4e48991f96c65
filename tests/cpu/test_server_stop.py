"""Ctrl-C at a server in this process: whenever the second one comes, it ends in good order."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from metainfer.arch.tiny import tiny_arch
from metainfer.server.app import create_app
from metainfer.server.run import EXIT_INTERRUPTED, bind, serve_forever
from metainfer.server.service import Service
from metainfer.server.settings import LOOPBACK
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.serving import MODEL, VOCAB
from tests.fakes.tiny_tokenizer import tiny_tokenizer


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_while_the_server_takes_itself_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Service.stop

    async def stop_and_interrupt(service: Service) -> None:
        interrupt()
        await stop(service)
        await asyncio.sleep(0)  # the loop sees the signal before uvicorn looks for it

    monkeypatch.setattr(Service, "stop", stop_and_interrupt)
    tokenizer = tiny_tokenizer(tmp_path, VOCAB)
    with FakeEngine(lambda _: [40]) as engine:
        app = create_app(engine, tokenizer, tiny_arch(vocab_size=VOCAB), model_names=(MODEL,))
        with bind(LOOPBACK, 0) as listener:
            assert serve_forever(app, listener, interrupt) == EXIT_INTERRUPTED
