"""DeepseekV4 against itself: however the rows of a sequence are divided into steps, whoever else is
in them, and whatever lies in memory that the sequence does not own, its logits stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from metainfer.arch.tiny import tiny_config
from metainfer.core.errors import MetainferError, UserError
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.ops.cache_formats import CacheFormats
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, Track, load_model

LENGTH = 300
TOLERANCE = 1e-5  # absolute, on logits of order 1
DRAFTS = 3


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return random_model(tmp_path_factory.mktemp("steps") / "model", tiny_config(**HARD), seed=1)


@pytest.fixture(scope="module", params=["reference", "default"])
def model(request: pytest.FixtureRequest, random_weights: RandomModel) -> DeepseekV4:
    order = "*=reference" if request.param == "reference" else ""
    return load_model(random_weights.directory, random_weights.arch, kernel_order=order)


@pytest.fixture
def driver(model: DeepseekV4, random_weights: RandomModel) -> Driver:
    return Driver(model, random_weights.arch)


@pytest.fixture(scope="module")
def one_shot(model: DeepseekV4, random_weights: RandomModel) -> Callable[[list[int]], torch.Tensor]:
    """Logits of tokens computed alone in one step, remembered."""
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def run(tokens: list[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in known:
            known[key] = Driver(model, random_weights.arch).run(tokens)
        return known[key]

    return run


def close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all are there and equal; false if one is NaN."""
    assert logits.shape == expected.shape
    return bool(((logits - expected).abs() < TOLERANCE).all())


@pytest.mark.parametrize(
    "lengths",
    [
        (128, 128),
        (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        (126, 1, 1, 1, 1, 1, 125, 1, 1, 1),
        (15, 1, 16, 17, 3, 3, 3, 3, 200),
        (36, 92, 5, 130),
    ],
    ids=str,
)
def test_chunks(driver: Driver, random_weights: RandomModel, one_shot, lengths) -> None:
    tokens = random_weights.tokens(LENGTH)
    assert close(driver.run(tokens, *lengths), one_shot(tokens))


def test_chunks_that_start_at_every_phase(
    driver: Driver, random_weights: RandomModel, one_shot
) -> None:
    tokens = random_weights.tokens(160)
    for start in (*range(1, 18), *range(124, 132)):
        assert close(driver.run(tokens, start), one_shot(tokens)), start


def test_token_by_token_from_nothing(driver: Driver, random_weights: RandomModel, one_shot) -> None:
    tokens = random_weights.tokens(140)
    assert close(driver.decode(tokens, driver.start()), one_shot(tokens))


def test_decoding_in_a_batch(driver: Driver, random_weights: RandomModel, one_shot) -> None:
    """Sequences of different lengths, some without an entry yet, together in every step."""
    prompts = (1, 3, 35, 260)
    tokens = [random_weights.tokens(LENGTH, seed) for seed in range(len(prompts))]
    sequences = [driver.start() for _ in prompts]
    for sequence, prompt, own in zip(sequences, prompts, tokens, strict=True):
        driver.step((sequence, own[:prompt]))
    for step in range(40):
        parts = [
            (sequence, [own[prompt + step]])
            for sequence, prompt, own in zip(sequences, prompts, tokens, strict=True)
        ]
        logits = driver.step(*parts, decoding=len(parts))
        for row, prompt, own in zip(logits, prompts, tokens, strict=True):
            assert close(row[0], one_shot(own)[prompt + step]), (step, prompt)


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_beside_strangers_and_rubbish(
    driver: Driver, random_weights: RandomModel, one_shot, seed: int
) -> None:
    """Random steps of decodes and chunks; NaN in everything that no living sequence owns, or what
    finished sequences left there."""
    draw = random.Random(seed)
    alive: list[tuple[Track, list[int]]] = []
    served = 0
    while served < 7 or alive:
        while served < 7 and len(alive) < 4 and draw.random() < 0.7:
            alive.append((driver.start(), random_weights.tokens(draw.randint(1, 200), served)))
            served += 1
        chosen = draw.sample(alive, draw.randint(min(1, len(alive)), len(alive)))
        parts = []
        for track, tokens in chosen:
            left = len(tokens) - track.computed
            rows = draw.choice((1, 1, draw.randint(1, 8), draw.randint(1, 150)))
            parts.append((track, tokens, tokens[track.computed :][: min(rows, left)]))
        parts.sort(key=lambda part: len(part[2]) > 1)  # those of one row decode
        if not parts:
            continue
        if draw.random() < 0.5:
            driver.poison([track for track, _ in alive])
        starts = [track.computed for track, _, _ in parts]
        decoding = sum(len(rows) == 1 for _, _, rows in parts)
        logits = driver.step(*((track, rows) for track, _, rows in parts), decoding=decoding)
        for (track, tokens, _), start, own in zip(parts, starts, logits, strict=True):
            assert close(own, one_shot(tokens)[start : track.computed])
        for track, tokens in [pair for pair in alive if pair[0].computed == len(pair[1])]:
            alive.remove((track, tokens))
            driver.finish(track)


@pytest.mark.parametrize("seed", range(3))
def test_rejected_drafts_leave_no_trace(random_weights: RandomModel, seed: int) -> None:
    """Decode steps of 1 + DRAFTS rows, of which some are wrong: two sequences verify drafts while a
    third is prefilled."""
    arch = random_weights.arch
    model = load_model(random_weights.directory, arch, kernel_order="", draft_rows=DRAFTS)
    driver = Driver(model, arch, draft_rows=DRAFTS)
    draw = random.Random(seed)
    tokens = [random_weights.tokens(170, number) for number in (0, 1)]
    expected = [driver.run(own) for own in tokens]
    tracks = [driver.start(), driver.start()]
    driver.step((tracks[0], tokens[0][:25]))
    driver.step((tracks[1], tokens[1][:2]))
    prompt = random_weights.tokens(150, 2)
    prompt_expected = driver.run(prompt)
    newcomer = driver.start()
    while all(track.computed < 165 for track in tracks):
        parts, right = [], []
        for track, own in zip(tracks, tokens, strict=True):
            rows = own[track.computed :][: 1 + draw.randint(0, DRAFTS)]
            good = draw.randint(1, len(rows))
            wrong = [(token + 1) % arch.vocab_size for token in rows[good:]]
            parts.append((track, rows[:good] + wrong))
            right.append(good)
        starts = [track.computed for track in tracks]
        chunk = prompt[newcomer.computed :][: draw.randint(5, 9)]
        start = newcomer.computed
        if len(chunk) > DRAFTS + 1:
            parts.append((newcomer, chunk))
        logits = driver.step(*(part for part in parts if part[1]), decoding=2)
        for i, track in enumerate(tracks):
            assert close(logits[i][: right[i]], expected[i][starts[i] : starts[i] + right[i]])
            driver.reject(track, len(parts[i][1]) - right[i])
        if len(parts) > 2:
            assert close(logits[2], prompt_expected[start : start + len(chunk)])


@pytest.mark.parametrize("wanted", [(1, 1, 2, 5), (1, 1, 0, 3), (1, 1, 150, 0), (1, 1, 0, 1)])
def test_rows_that_nobody_reads_are_left_out_of_the_last_layer(
    driver: Driver, random_weights: RandomModel, one_shot, wanted: tuple[int, ...]
) -> None:
    """Two sequences decode beside two prompts; later steps find the caches as ever."""
    prompts = (35, 127, 40, 3)
    tokens = [random_weights.tokens(LENGTH, seed) for seed in range(len(prompts))]
    tracks = [driver.start() for _ in prompts]
    driver.step(
        *zip(tracks, (own[:n] for own, n in zip(tokens, prompts, strict=True)), strict=True),
        wanted=(0, 0, 0, 1),
    )
    chunks = (1, 1, 150, 60)
    parts = [
        (track, own[track.computed :][:rows])
        for track, own, rows in zip(tracks, tokens, chunks, strict=True)
    ]
    logits = driver.step(*parts, decoding=2, wanted=wanted)
    for track, own, got, count in zip(tracks, tokens, logits, wanted, strict=True):
        assert close(got, one_shot(own)[track.computed - count : track.computed])
    for track, own in zip(tracks, tokens, strict=True):
        (following,) = driver.step((track, own[track.computed :][:9]))
        assert close(following, one_shot(own)[track.computed - 9 : track.computed])


def test_a_sequence_of_nan_keeps_it_to_itself(
    driver: Driver, random_weights: RandomModel, one_shot
) -> None:
    """Whatever breaks one sequence's cache, its neighbours in the batch do not see it."""
    tokens = random_weights.tokens(80)
    sick, well = driver.start(), driver.start()
    driver.step((sick, tokens[:70]))
    driver.step((well, tokens[:70]))
    driver.poison([well])
    for position in range(70, 80):
        token = [tokens[position]]
        ill, fine = driver.step((sick, token), (well, token), decoding=2)
        assert ill.isnan().all()
        assert close(fine[0], one_shot(tokens)[position])


def test_a_cache_in_bf16_gives_the_same_whatever_the_chunks(random_weights: RandomModel) -> None:
    """Chunks read their own latents as the cache will keep them. What is left between two ways of
    chunking are latents that lie on the border of two bf16 numbers."""
    model = load_model(random_weights.directory, random_weights.arch, kernel_order="")
    driver = Driver(model, random_weights.arch, caches=CacheFormats("bfloat16", "bfloat16"))
    tokens = random_weights.tokens(LENGTH)
    whole = driver.run(tokens)
    rounding = (Driver(model, random_weights.arch).run(tokens) - whole).abs().mean()
    chunked = driver.run(tokens, 10, 117, 30)
    decoded = driver.decode(tokens[:150], driver.start())
    assert 1e-3 < rounding < 2e-2
    assert (chunked - whole).abs().mean() < rounding / 20
    assert (decoded - whole[:150]).abs().mean() < rounding / 20


def test_a_cache_with_other_rings_is_refused(random_weights: RandomModel) -> None:
    arch = random_weights.arch
    model = load_model(random_weights.directory, arch, draft_rows=1)
    with pytest.raises(MetainferError, match="0 draft rows, the model 1"):
        Driver(model, arch).run([1, 2, 3])


def test_what_cannot_be_computed_is_refused(random_weights: RandomModel) -> None:
    arch = random_weights.arch
    with pytest.raises(UserError, match="float16"):
        load_model(random_weights.directory, arch, compute_dtype=torch.float16)
    with pytest.raises(UserError, match="unknown backend fastest"):
        load_model(random_weights.directory, arch, kernel_order="*=fastest")
