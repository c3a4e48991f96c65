"""transformers as a contender."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from metainfer.arch.families import read_arch
from metainfer.bench.contender import Prompts, Timing
from metainfer.bench.peer_transformers import PeerSession, load_peer
from metainfer.weights.load import Checkpoint


class PeerContender:
    """`DeepseekV4ForCausalLM` on the CPU, called as its own `generate` calls it, without the
    overhead of that."""

    def __init__(self, directory: Path, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self._dtype = dtype
        with Checkpoint.open(directory, read_arch(directory)) as checkpoint:
            self._model = load_peer(directory, checkpoint, getattr(torch, dtype))

    @property
    def dtype(self) -> str:
        return self._dtype

    def prefill(self, prompt: Sequence[int]) -> Timing:
        token_ids = torch.tensor([list(prompt)])
        started_s = time.perf_counter()
        PeerSession(self._model).step(token_ids).argmax(-1)
        return Timing(len(prompt), time.perf_counter() - started_s)

    def decode(self, prompts: Prompts, count: int) -> Timing:
        session = PeerSession(self._model)
        token_ids = session.step(torch.tensor([list(p) for p in prompts])).argmax(-1)
        started_s = time.perf_counter()
        for _ in range(count - 1):
            token_ids = session.step(token_ids.unsqueeze(1)).argmax(-1)
            token_ids.tolist()  # as an engine does, so that a stop token could end a sequence
        return Timing(len(prompts) * (count - 1), time.perf_counter() - started_s)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        return PeerSession(self._model).greedy(prompt, count)
