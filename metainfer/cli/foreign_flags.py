"""Flags of vLLM and SGLang that metainfer does not have, and what to do instead.

Flags that it does have under their name or as an alias are not here; a test holds the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_NO_OFFLOAD = "weights stay on one device in this version: leave it out"
_NO_LORA = "adapters are not supported: merge them into the weights beforehand"
_NO_SPECULATION = "speculative decoding is not in this version: leave it out"
_NO_PREFIX_CACHE = "prefixes are not reused in this version: leave it out"
_PARSER_BY_MODEL = "the output parser follows from the model: leave it out"

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "--machine": "it works on the machine at hand: `metainfer env`, `probe`, `plan`, `doctor`"
        " and `kernels coverage` look at a recorded one",
    }
)
"""Flags that only some verbs have: what those without them say."""

FOREIGN_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--attention-backend": "kernels are chosen by the plan: leave it out",
        "--block-size": "the block size follows from the model's compression ratios: leave it out",
        "--chat-template": "the chat encoding follows from the model: leave it out",
        "--cpu-offload-gb": _NO_OFFLOAD,
        "--cuda-graph-max-bs": "give the largest number of rows to --cuda-graph-sizes",
        "--data-parallel-size": "start one server per replica: leave it out",
        "--disable-log-requests": "a request is a line of the log that holds nothing it says:"
        " leave it out, or give --log-level warning",
        "--disable-radix-cache": _NO_PREFIX_CACHE,
        "--dp-size": "start one server per replica: leave it out",
        "--enable-auto-tool-choice": "tool calls are always parsed: leave it out",
        "--enable-chunked-prefill": "long prompts are always prefilled in chunks: leave it out",
        "--enable-lora": _NO_LORA,
        "--enable-prefix-caching": _NO_PREFIX_CACHE,
        "--generation-config": "defaults of sampling are read from the model's"
        " generation_config.json: leave it out",
        "--lora-modules": _NO_LORA,
        "--lora-paths": _NO_LORA,
        "--moe-runner-backend": "kernels are chosen by the plan: leave it out",
        "--quantization": "the format is read from the checkpoint's config.json: leave it out",
        "--reasoning-parser": _PARSER_BY_MODEL,
        "--revision": "name a local directory that holds the revision you want",
        "--skip-tokenizer-init": "the tokenizer is needed: send token ids as the prompt if you"
        " have them",
        "--speculative-algorithm": _NO_SPECULATION,
        "--speculative-config": _NO_SPECULATION,
        "--swap-space": "preempted requests are recomputed, not swapped: leave it out",
        "--tokenizer-path": "the tokenizer is read from the model's directory: leave it out",
        "--tool-call-parser": _PARSER_BY_MODEL,
        "--trust-remote-code": "code of a checkpoint is never run: leave it out",
    }
)
