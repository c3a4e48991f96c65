"""transformers as a contender."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from metainfer.arch.families import read_arch
from metainfer.arch.overrides import cuts_layers
from metainfer.bench.contender import Prompts, Timing
from metainfer.bench.peer_transformers import PeerSession, load_peer
from metainfer.bench.traffic import Arrival, Served
from metainfer.core.errors import UserError
from metainfer.kernels.gpu.current import use_device
from metainfer.plan.settings import EngineSettings, LoadFormat
from metainfer.weights.dummy import DummyCheckpoint
from metainfer.weights.load import Checkpoint


class PeerContender:
    """`DeepseekV4ForCausalLM`, called as its own `generate` calls it, without the overhead of
    that."""

    def __init__(
        self, model: Path, settings: EngineSettings, dtype: str, device: str, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        use_device(device)
        self._dtype = dtype
        self._device = torch.device(device)
        self._prompt_tokens = 0
        began_s = time.perf_counter()
        arch = read_arch(model, settings.hf_overrides)
        if settings.load_format == LoadFormat.DUMMY:
            source: Checkpoint = DummyCheckpoint(arch, device)
        else:
            cut = cuts_layers(settings.hf_overrides)
            source = Checkpoint.open(model, arch, more_layers=cut)
        with source as checkpoint:
            self._model = load_peer(
                model, checkpoint, getattr(torch, dtype), self._device, settings.hf_overrides
            )
        self._load_s = time.perf_counter() - began_s

    @property
    def dtype(self) -> str:
        return self._dtype

    @property
    def gpus(self) -> tuple[int, ...]:
        return () if self._device.type == "cpu" else (torch.cuda.current_device(),)

    def prefill(self, prompt: Sequence[int]) -> Timing:
        token_ids = self._ids([prompt])
        started_s = time.perf_counter()
        PeerSession(self._model).step(token_ids).argmax(-1).tolist()
        return Timing(len(prompt), time.perf_counter() - started_s)

    def decode(self, prompts: Prompts, count: int, on_start: Callable[[], None]) -> Timing:
        session = PeerSession(self._model)
        token_ids = session.step(self._ids(prompts)).argmax(-1)
        token_ids.tolist()
        on_start()
        started_s = time.perf_counter()
        for _ in range(count - 1):
            token_ids = session.step(token_ids.unsqueeze(1)).argmax(-1)
            token_ids.tolist()  # as an engine does, so that a stop token could end a sequence
        return Timing(len(prompts) * (count - 1), time.perf_counter() - started_s)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        return PeerSession(self._model).greedy(prompt, count)

    def score(self, windows: Prompts) -> list[list[tuple[float, list[tuple[int, float]]]]]:
        raise UserError("transformers is no setting of this engine")

    def traffic(self, arrivals: Sequence[Arrival]) -> list[Served]:
        raise UserError("transformers schedules no requests")

    def receipt(self) -> dict[str, Any]:
        config = self._model.config
        return {
            "version": transformers.__version__,
            "attention": config._attn_implementation,
            "experts": getattr(config, "_experts_implementation", None),
            "load_s": self._load_s,
        }

    def counted(self) -> dict[str, int]:
        return {"prompt_tokens": self._prompt_tokens, "cached_tokens": 0}

    def _ids(self, prompts: Prompts) -> torch.Tensor:
        self._prompt_tokens += sum(map(len, prompts))
        return torch.tensor([list(prompt) for prompt in prompts], device=self._device)
