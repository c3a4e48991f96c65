"""`bench quality`: the divergence against the exact one, the verdict, the data, a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from metainfer.arch.families import read_arch
from metainfer.arch.tiny import tiny_arch, tiny_config
from metainfer.bench import quality_run
from metainfer.bench.quality_compare import Divergence, divergence, verdict
from metainfer.bench.quality_data import Hidden, QualityData, read_data
from metainfer.bench.quality_settings import QualityLoad
from metainfer.bench.stages import Contestant
from metainfer.core.errors import UserError
from metainfer.shipped import pebble_dir
from tests.fakes.command import metainfer

LOAD = QualityLoad(a="tuned", b="tuned")


def told(logits_NV: torch.Tensor, ids: list[int], most: int) -> list[tuple[float, list]]:
    """What an engine tells of a window with these logits."""
    logprobs_NV = logits_NV.double().log_softmax(-1)
    tops = [row.topk(most) for row in logprobs_NV]
    return [
        (float(row[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        for row, token, top in zip(logprobs_NV, ids[1:], tops, strict=True)
    ]


def logits(sharpness: float) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(3)
    a_NV = sharpness * torch.randn(40, 200, generator=generator)
    b_NV = a_NV + 0.2 * torch.randn(40, 200, generator=generator)
    ids = torch.randint(0, 200, (41,), generator=generator).tolist()
    return a_NV, b_NV, ids


@pytest.mark.parametrize(("sharpness", "share", "most"), [(8.0, 0.97, 20), (2.0, 0.999, 200)])
def test_the_divergence_is_the_exact_one_where_enough_is_told(
    sharpness: float, share: float, most: int
) -> None:
    a_NV, b_NV, ids = logits(sharpness)
    found = divergence([told(a_NV, ids, most)], [told(b_NV, ids, most)], [ids])
    a, b = a_NV.double().log_softmax(-1), b_NV.double().log_softmax(-1)
    exact = float((a.exp() * (a - b)).sum(-1).mean())
    assert found.told >= share
    assert found.kl == pytest.approx(exact, rel=0.1)
    assert found.top1 == pytest.approx(float((a.argmax(-1) == b.argmax(-1)).float().mean()))
    rows = torch.arange(40)
    nats = -float(b[rows, torch.tensor(ids[1:])].mean())
    assert found.perplexity_b == pytest.approx(math.exp(nats))


def test_it_is_a_lower_bound_and_0_of_the_same() -> None:
    a_NV, b_NV, ids = logits(1.0)
    found = divergence([told(a_NV, ids, 5)], [told(b_NV, ids, 5)], [ids])
    a, b = a_NV.double().log_softmax(-1), b_NV.double().log_softmax(-1)
    assert 0 < found.kl <= float((a.exp() * (a - b)).sum(-1).mean())
    same = divergence([told(a_NV, ids, 5)], [told(a_NV, ids, 5)], [ids])
    assert (same.kl, same.top1, same.perplexity_rise) == (pytest.approx(0, abs=1e-9), 1.0, 0.0)


def test_the_verdict_names_what_does_not_pass() -> None:
    good = Divergence(9, 0.001, 0.01, 0.1, 0.99, 0.99, 10.0, 10.05)
    passed = verdict(good, None, None, LOAD.thresholds)
    assert passed["passed"]
    assert "needles" not in passed["judged"]
    assert verdict(good, 0.9, 0.89, LOAD.thresholds)["passed"]
    bad = Divergence(9, 0.05, 0.5, 1.0, 0.99, 0.9, 10.0, 10.5)
    failed = verdict(bad, 0.9, 0.5, LOAD.thresholds)
    assert not failed["passed"]
    assert [what.split()[0] for what in failed["failed"]] == [
        "divergence", "perplexity", "equal", "40.00%",
    ]  # fmt: skip


def test_what_is_no_number_does_not_pass() -> None:
    a_NV, b_NV, ids = logits(1.0)
    b_NV[3] = float("nan")
    found = divergence([told(a_NV, ids, 5)], [told(b_NV, ids, 5)], [ids])
    assert math.isnan(found.perplexity_b)
    failed = verdict(found, None, None, LOAD.thresholds | {"top1": 0.0})["failed"]
    assert [what.split()[0] for what in failed] == ["divergence", "perplexity"]


def test_the_shipped_model_brings_its_data() -> None:
    arch = read_arch("pebble")
    data = read_data(LOAD, pebble_dir(), arch)
    assert (len(data.windows), len(data.needles)) == (LOAD.windows, LOAD.most_needles)
    assert max(map(len, data.windows)) <= LOAD.window_tokens
    assert data.longest < arch.max_model_len
    distances = [needle.distance for needle in data.needles]
    assert max(distances) > 4 * min(distances)


def test_ids_come_from_a_file_or_are_drawn(tmp_path: Path) -> None:
    arch = tiny_arch()
    drawn = read_data(LOAD, tmp_path, arch)
    assert (drawn.source, len(drawn.windows), drawn.needles) == ("random token ids", 16, ())
    assert drawn.windows == read_data(LOAD, tmp_path, arch).windows
    path = tmp_path / "ids.jsonl"
    path.write_text("[1, 2, 3]\n\n[4, 5]\n")
    load = QualityLoad(a="tuned", b="tuned", token_ids=path)
    assert read_data(load, tmp_path, arch).windows == ((1, 2, 3), (4, 5))
    for text, message in (
        ("[1]", "line 1: not a list of two or more token ids below 512"),
        ("[1, 512]", "line 1: not a list"),
        ("{", "line 1: not JSON"),
        ("", "holds no windows"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_data(load, tmp_path, arch)
    with pytest.raises(UserError, match=r"has no tokenizer.json, which --text and --needles need"):
        read_data(QualityLoad(a="tuned", b="tuned", text=path), tmp_path, arch)


def test_each_prompt_that_is_done_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Side:
        ready: ClassVar[dict[str, str]] = {}

        def must(self, do: str, **arguments: Any) -> dict[str, Any]:
            if do == "counted":
                return {"prompt_tokens": 9, "steps": 1}
            return {"scores": [[0.5]]} if do == "score" else {"ids": list(arguments["prompts"][0])}

    @contextmanager
    def sides(*_: Any) -> Iterator[Side]:
        yield Side()

    monkeypatch.setattr(quality_run, "side_process", sides)
    needles = (Hidden((7,), (7,), 1), Hidden((7,), (8,), 1))
    data = QualityData(((1, 2), (3, 4, 5)), needles, "lines")
    words: list[str] = []
    done: list[tuple[int, int]] = []
    setting = Contestant("A", {}, 1)
    said = quality_run.measure(LOAD, [setting], data, words.append, lambda *n: done.append(n))
    assert words == ["A: loading", "A: 2 windows, 2 needles"]
    assert done == [(n, 6) for n in range(1, 7)]
    assert said["A"]["recalled"] == [True, False]
    assert said["A"]["greedy"] == [[1, 2], [3, 4, 5]]


def test_the_verb_judges_two_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    common = (
        "bench", "quality", str(tmp_path), "--load-format", "dummy", "--device", "cpu",
        "--threads", "1", "--a", "tuned", "--b", "tuned,--dtype=bfloat16", "--windows", "2",
        "--window-len", "60", "--answer-len", "2", "--save-result", "--result-dir", str(tmp_path),
    )  # fmt: skip
    strict = ("--most-kl", "0", "--least-top1", "0", "--most-perplexity-rise", "1")
    ran = metainfer(*common, *strict)
    assert ran.code == 1, ran.err
    assert "failed: divergence" in ran.out
    assert "the plan keeps caches" not in ran.err  # drawn weights are no checkpoint
    made = json.loads((tmp_path / "bench-quality.json").read_text())
    assert made["verdict"]["passed"] is False
    assert made["divergence"]["tokens"] == 2 * 59
    assert 0 < made["divergence"]["kl"] < 0.1
    assert made["sides"]["B"]["receipt"]["dtype"] == "bfloat16"
    assert made["sides"]["A"]["tokens"] == {"prompt_tokens": 4 * 60, "cached_tokens": 0}
