"""Servers with keys, of models that do not fit, and with engines that are not ready or gone."""

from __future__ import annotations

import openai
import pytest

from metainfer.core.errors import UserError
from metainfer.server.settings import ServerSettings
from metainfer.text.tokenizer import Tokenizer
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.serving import MODEL, VOCAB, error_of, serving, wait_for
from tests.fakes.tiny_tokenizer import tiny_tokenizer, write_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CHAT_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}]}
TEXT_BODY = {"model": MODEL, "prompt": "x"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)


def test_keys_open_all_but_health(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(api_keys=("first", "zweiter-schlüssel"), cors_origins=("http://a",))
    with (
        FakeEngine(lambda _: [40]) as engine,
        serving(engine, tokenizer, settings) as served,
        served.http() as http,
    ):
        for key in (None, "firs", "first1", "FIRST", "é"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            answer = http.post(TEXT, json=TEXT_BODY, headers=headers)
            error = error_of(answer, 401)
            assert error["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert http.get("/metrics").status_code == http.get("/plan").status_code == 401
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        assert engine.submitted == []
        for key in settings.api_keys:
            headers = {"Authorization": f"bearer  {key}".encode()}
            assert http.post(TEXT, json=TEXT_BODY, headers=headers).status_code == 200
        assert served.openai("first").models.list().data[0].id == MODEL
        with pytest.raises(openai.AuthenticationError):
            served.openai("other").models.list()
        asked = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
        preflight = http.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://a"


def test_a_model_without_the_chat_markup_completes_text(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = write_tokenizer(tmp_path_factory.mktemp("plain"), VOCAB)
    file = directory / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<think>", "<thunk>"))
    plain = Tokenizer.load(directory)
    with (
        FakeEngine(lambda _: [40]) as engine,
        serving(engine, plain) as served,
        served.http() as http,
    ):
        error = error_of(http.post(CHAT, json=CHAT_BODY))
        assert error["code"] == "no_chat" and "<think>" in error["message"]
        assert http.post(TEXT, json=TEXT_BODY).status_code == 200


def test_a_tokenizer_of_another_model_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    larger = tiny_tokenizer(tmp_path_factory.mktemp("larger"), VOCAB + 1)
    with (
        FakeEngine(lambda _: [40]) as engine,
        pytest.raises(UserError, match=f"{VOCAB + 1} tokens, but the model has {VOCAB}"),
        serving(engine, larger),
    ):
        pass


def test_a_server_that_is_not_ready_or_whose_engine_is_gone(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda _: [40])
    with serving(engine, tokenizer, ready=False) as served, served.http() as http:
        assert http.get("/health").status_code == 200
        assert error_of(http.get("/ready"), 503)["code"] == "not_ready"
        assert http.get("/ready").headers["retry-after"] == "1"
        error_of(http.post(TEXT, json=TEXT_BODY), 503)
        served.service.ready = True
        assert http.get("/ready").status_code == 200
        assert http.post(TEXT, json=TEXT_BODY).status_code == 200
        engine.die()
        assert error_of(http.get("/health"), 503)["code"] == "engine_dead"
        error_of(http.get("/ready"), 503)
        wait_for(lambda: http.post(TEXT, json=TEXT_BODY).status_code == 503)
        assert "metainfer:engine_alive" in http.get("/metrics").text
