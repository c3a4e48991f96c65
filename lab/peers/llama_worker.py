"""llama.cpp as one side of compare_llama.py: JSON lines in on stdin, JSON lines out.

Runs in the environment that has llama-cpp-python; knows nothing of metainfer. Calls llama.cpp's C
functions directly, so that none of the Python wrapper's work is timed. What each command does is
told by engine_worker.py, whose answers have the same fields.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

import llama_cpp as lc
import numpy as np


class LlamaSide:
    """One GGUF file, loaded, with one sequence.

    Args (of `setup`):
        gguf: the file.
        exact: fp32 caches and no flash attention, as fits a file of fp32 weights.
        threads, max_model_len, ubatch: the last is llama.cpp's physical batch, in tokens.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        lc.llama_backend_init()
        model_params = lc.llama_model_default_params()
        started_s = time.perf_counter()
        self._model = lc.llama_model_load_from_file(setup["gguf"].encode(), model_params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {setup['gguf']}")
        params = lc.llama_context_default_params()
        params.n_ctx = setup["max_model_len"]
        params.n_batch = setup["max_model_len"]
        params.n_ubatch = setup["ubatch"]
        params.n_threads = params.n_threads_batch = setup["threads"]
        if setup["exact"]:
            params.type_k = params.type_v = lc.GGML_TYPE_F32
            params.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = lc.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp cannot make a context; its reason is above")
        self.load_s = time.perf_counter() - started_s
        self._vocab_size = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self._model))

    def prefill(self, prompt: list[int], count: int) -> dict[str, Any]:
        del count
        self._forget()
        started_s = time.perf_counter()
        self._run(prompt).argmax()
        return {"tokens": len(prompt), "seconds": time.perf_counter() - started_s}

    def decode(self, prompt: list[int], count: int) -> dict[str, Any]:
        self._forget()
        token = int(self._run(prompt).argmax())
        started_s = time.perf_counter()
        for _ in range(count - 1):
            token = int(self._run([token]).argmax())
        return {"tokens": count - 1, "seconds": time.perf_counter() - started_s}

    def greedy(self, prompt: list[int], count: int) -> dict[str, Any]:
        self._forget()
        logits = self._run(prompt)
        ids: list[int] = []
        while len(ids) < count:
            ids.append(int(logits.argmax()))
            logits = self._run([ids[-1]])
        return {"ids": ids}

    def follow(self, prompt: list[int], given: list[int]) -> dict[str, Any]:
        """What it would have said at each place of `given`, which it is made to follow."""
        self._forget()
        logits = self._run(prompt)
        ids, logprobs = [], []
        for token in given:
            ids.append(int(logits.argmax()))
            logprobs.append(_logprob(logits, token))
            logits = self._run([token])
        return {"ids": ids, "logprobs": logprobs}

    def _forget(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self._context), True)

    def _run(self, tokens: list[int]) -> np.ndarray:
        """Append tokens; the logits after the last one (a view that the next call overwrites)."""
        array = (lc.llama_token * len(tokens))(*tokens)
        status = lc.llama_decode(self._context, lc.llama_batch_get_one(array, len(tokens)))
        if status:
            raise SystemExit(f"llama_decode returned {status} for {len(tokens)} tokens")
        pointer = lc.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))


def _logprob(logits: np.ndarray, token: int) -> float:
    values = logits.astype(np.float64)
    return float(values[token] - values.max() - np.log(np.exp(values - values.max()).sum()))


def main() -> None:
    # Replies go to the real stdout; whatever llama.cpp prints goes to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(record: dict[str, Any]) -> None:
        replies.write(json.dumps(record) + "\n")
        replies.flush()

    side = LlamaSide(json.loads(sys.argv[1]))
    reply(
        {
            "load_s": side.load_s,
            "about": {
                "llama-cpp-python": version("llama-cpp-python"),
                "system": lc.llama_print_system_info().decode().strip(" |"),
            },
        }
    )
    for line in sys.stdin:
        command = json.loads(line)
        reply(getattr(side, command["do"])(command["prompt"], command["argument"]))


if __name__ == "__main__":
    main()
