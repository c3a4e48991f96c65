"""Caches that grow, divided over ranks: the logits of one rank.

Ranks are threads here; those of processes move the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from metainfer.arch.tiny import tiny_config, tiny_quantised_config
from metainfer.comm.group import Group
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.nn.kv_shards import KvShards
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, load_model

TOLERANCE = 1e-5  # absolute, on logits of order 1
NUM_BLOCKS = 24  # of 128 tokens, on all shards together


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(o_groups=4, **HARD)
    return random_model(tmp_path_factory.mktemp("shards") / "model", config, seed=1)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_quantised_config(
        o_groups=4, compress_ratios=[0, 0, 4, 128, 4], num_nextn_predict_layers=0, **HARD
    )
    return random_model(tmp_path_factory.mktemp("shards") / "model", config, seed=2)


def whole(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """Prompts of odd lengths, each in one step; the shortest are on one shard alone."""
    return [driver.run(model.tokens(length, seed=length)) for length in (1, 127, 523)]


def chunked(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """Chunks begin and end at any place of a shard's part of a block."""
    return [driver.run(model.tokens(663, seed=5), 15, 1, 17, 3, 200, 27, 388)]


def decoded(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """Sequences of different lengths, together in every step, across the ends of the first shard's
    part, of a block and of all that one shard chooses from; one begins beside those."""
    prompts = (1, 125, 254, 509)
    tokens = [model.tokens(530, seed) for seed in range(len(prompts))]
    sequences = [driver.start() for _ in prompts[1:]]
    found = driver.step(
        *((s, own[:n]) for s, own, n in zip(sequences, tokens, prompts[1:], strict=False)),
        wanted=[1, 0, 3],
    )
    late, later = driver.start(), model.tokens(40, 9)
    for step in range(5):
        parts = [
            (sequence, [own[prompt + step]])
            for sequence, own, prompt in zip(sequences, tokens, prompts[1:], strict=False)
        ]
        chunk = (late, later[5 * step : 5 * step + 5])
        found += driver.step(*parts, chunk, decoding=len(parts))
    for sequence in (*sequences, late):
        driver.finish(sequence)
    return found


def in_fixed_shapes(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """Beside padding, from where nothing is chosen to where shards choose; then without."""
    short, long = driver.start(), driver.start()
    first, second = model.tokens(20, 7), model.tokens(700, 8)
    found = driver.step((long, second[:510]))
    blocks = -(-NUM_BLOCKS // driver.kv_shards)
    for step in range(4):
        parts = (short, [first[step]]), (long, second[510 + step : 511 + step])
        found += driver.fixed_step(*parts, rows=5 if step % 2 else 2, blocks=blocks)
    for sequence in (short, long):
        driver.finish(sequence)
    return found


def preempted(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """A sequence loses its cache and is computed again, in chunks that fall elsewhere."""
    tokens = model.tokens(450, seed=3)
    first, beside = driver.start(), driver.start()
    found = driver.step((first, tokens[:431]), (beside, tokens[:7]))
    driver.finish(first)
    driver.poison([beside])
    again = driver.start()
    for start, end in ((0, 250), (250, 433)):
        found += driver.step((beside, [tokens[0]]), (again, tokens[start:end]), decoding=1)
    found.append(driver.decode(tokens[433:440], again))
    for sequence in (again, beside):
        driver.finish(sequence)
    return found


def of_rank(
    model: RandomModel, group: Group | None = None, context: int = 1, kv_shards: int = 1
) -> list[torch.Tensor]:
    loaded = load_model(
        model.directory,
        model.arch,
        kernel_order="",
        group=group,
        context=context,
        kv_shards=kv_shards,
    )
    blocks = NUM_BLOCKS // kv_shards + 4
    driver = Driver(loaded, model.arch, num_blocks=blocks, kv_shards=kv_shards)
    bodies: tuple[Callable[[Driver, RandomModel], list[torch.Tensor]], ...] = (
        whole, chunked, decoded, in_fixed_shapes, preempted,
    )  # fmt: skip
    return [logits for body in bodies for logits in body(driver, model)]


@pytest.fixture(scope="module")
def alone(plain: RandomModel, quantised: RandomModel) -> dict[str, list[torch.Tensor]]:
    return {"plain": of_rank(plain), "quantised": of_rank(quantised)}


@pytest.mark.parametrize(
    ("name", "ranks", "context", "kv_shards"),
    [
        ("plain", 2, 1, 2),
        pytest.param("quantised", 4, 1, 4, marks=pytest.mark.soak),
        ("plain", 4, 1, 2),
        ("quantised", 2, 2, 2),
    ],
)
def test_shards_give_the_logits_of_one(
    request: pytest.FixtureRequest,
    alone: dict[str, list[torch.Tensor]],
    name: str,
    ranks: int,
    context: int,
    kv_shards: int,
) -> None:
    model: RandomModel = request.getfixturevalue(name)
    found = run_ranks(
        virtual_groups(ranks), lambda group: of_rank(model, group, context, kv_shards)
    )
    for number, expected in enumerate(alone[name]):
        first = found[0][number]
        assert first.shape == expected.shape
        assert bool(((first - expected).abs() < TOLERANCE).all()), number
        assert all(torch.equal(other[number], first) for other in found[1:])


@pytest.mark.parametrize(("shards", "ratio"), [(2, 4), (4, 4), (3, 32)])
def test_shards_choose_what_one_rank_chooses(shards: int, ratio: int) -> None:
    """Of many equal scores, zeros of either sign among them, the entries with lower numbers."""
    rows, topk = 6, 40
    generator = torch.Generator().manual_seed(shards)
    scores_TE = torch.randint(-2, 3, (rows, 300), generator=generator).float() * 0.5
    scores_TE[1] *= -0.0
    scores_TE[2, :250] = torch.finfo(torch.float32).min
    seen_T1 = torch.tensor([[300], [299], [300], [30], [0], [150]])
    masked_TE = scores_TE.masked_fill(torch.arange(300) >= seen_T1, -torch.inf)
    order_TE = masked_TE.argsort(dim=1, descending=True, stable=True)
    expected = [
        set(order_E[: min(topk, seen)].tolist())
        for order_E, seen in zip(order_TE, seen_T1.flatten().tolist(), strict=True)
    ]

    def chosen(group: Group) -> list[set[int]]:
        kv = KvShards(group)
        entries_E = torch.arange(300)
        own_E = entries_E[kv.place(entries_E, ratio)[0] == kv.own]
        assert len(own_E) == kv.held(300, ratio) == int(kv.held_of(torch.tensor(300), ratio))
        own_TE = masked_TE[:, own_E]
        found = own_TE.sort(dim=1, descending=True, stable=True)
        ids_TK = torch.nn.functional.pad(found.indices, (0, topk), value=-1)[:, :topk]
        scores_TK = torch.nn.functional.pad(found.values, (0, topk), value=-torch.inf)[:, :topk]
        ids_TK = ids_TK.masked_fill(scores_TK == -torch.inf, -1)
        best_TK = kv.best(ids_TK, scores_TK, ratio)
        numbers_TK = kv.numbers(ids_TK, ratio)
        return [set(n[b].tolist()) for n, b in zip(numbers_TK, best_TK, strict=True)]

    parts = run_ranks(virtual_groups(shards), chosen)
    assert [set().union(*(part[row] for part in parts)) for row in range(rows)] == expected
    assert sum(len(part[0]) for part in parts) == topk
