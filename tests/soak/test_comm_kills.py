"""Ranks killed anywhere, hundreds of times: `make soak`. The first of these run with all tests."""

from __future__ import annotations

import multiprocessing

import pytest

from metainfer.comm.group import RankLost
from metainfer.comm.processes import run_processes
from metainfer.comm.world import World
from tests.fakes import rank_bodies

KILLS = 500


@pytest.mark.parametrize("kind", ["host", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_is_killed_anywhere_and_all_others_end(kind: str, size: int) -> None:
    multiprocessing.set_forkserver_preload(["tests.fakes.rank_bodies"])
    for seed in range(KILLS // 4):
        told: dict[int, str] = {}
        world = World(size, deadline_s=60.0, piece_bytes=4096)
        try:
            with pytest.raises(RankLost, match=r"the process of rank \d ended with SIGKILL"):
                run_processes(
                    world, rank_bodies.killed_at_random, (kind, 1000 * size + seed), longest_s=120,
                    method="forkserver", on_report=told.__setitem__,
                )  # fmt: skip
        finally:
            world.close()
        assert len(told) == size - 1, seed
        assert all("ended" in text for text in told.values()), seed
