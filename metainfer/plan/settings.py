"""EngineSettings: what the user fixed of an engine; None leaves a value to the plan.

Owns the flags and the checks that need no model and no machine; `plan.build` does the rest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from metainfer.core.config import Stability, flag
from metainfer.core.errors import UserError
from metainfer.hardware.device_names import parse_device
from metainfer.ops.cache_formats import INDEX_DTYPES, LATENT_DTYPES
from metainfer.ops.targets import parse_portable
from metainfer.plan.wires import WIRES


class Residency(StrEnum):
    """How quantised matrices are kept in memory once loaded."""

    QUANTISED = "quantised"  # as stored; unpacked where they are used
    EXPANDED = "expanded"  # unpacked once into the compute dtype, without loss


class LoadFormat(StrEnum):
    """Where the weights come from."""

    AUTO = "auto"  # the checkpoint's files
    DUMMY = "dummy"  # drawn at random on the device, in the formats that the config names


DTYPES = ("float32", "bfloat16")
ACTIVATIONS = ("plain", "fp8")
SWITCH = ("on", "off")
FP8_NAMES = ("fp8_e4m3", "fp8_ds_mla")  # of SGLang, and of vLLM for these models


def parse_overrides(text: str) -> dict[str, Any]:
    """The object of --hf-overrides. Raises UserError."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"'{text}' is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"'{text}' is not a JSON object")
    return values


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Flags of the engine. Lengths in tokens; names after vLLM, aliases after SGLang.

    Raises UserError naming the flag whose value no machine and no model could serve.
    """

    plan: str | None = flag(
        "--plan",
        "A file that `metainfer plan MODEL -o FILE` wrote: its layout, and its lengths, counts and"
        " formats where no flag says otherwise",
        unit="file",
    )
    load_format: str = flag(
        "--load-format",
        "Read the checkpoint's files, or draw random weights in its formats straight into memory:"
        " then MODEL may be a known name, or a directory that holds config.json alone",
        str(LoadFormat.AUTO),
        choices=tuple(LoadFormat),
    )
    hf_overrides: dict[str, Any] | None = flag(
        "--hf-overrides",
        "Values of config.json to replace, as a JSON object; fewer num_hidden_layers are the first"
        " layers of the model",
        aliases=("--json-model-override-args",),
        unit="json",
        parse=parse_overrides,
    )
    device: str | None = flag(
        "--device",
        "Where the model runs: cpu, cuda, or one GPU such as cuda:1",
        unit="device",
        parse=parse_device,
    )
    code_for: str | None = flag(
        "--as",
        "Run the code for this older GPU, such as sm_89, on a newer one, which translates it",
        unit="target",
        stability=Stability.EXPERIMENTAL,
    )
    dtype: str | None = flag("--dtype", "Format of activations and matrix products", choices=DTYPES)
    activations: str | None = flag(
        "--activations",
        "How rows go into products with quantised matrices: as they are, or rounded to fp8 groups",
        choices=ACTIVATIONS,
        stability=Stability.EXPERIMENTAL,
    )
    shared_expert_stream: str | None = flag(
        "--shared-expert-stream",
        "Run the shared expert on a stream of its own, beside the routed experts: on, off, or in"
        " steps of so many rows at most",
        unit="when",
        stability=Stability.EXPERIMENTAL,
    )
    kv_cache_dtype: str | None = flag(
        "--kv-cache-dtype",
        "Format of the caches of latents and compressed entries; fp8 keeps the bytes that the"
        " released models were trained with",
        choices=(*LATENT_DTYPES, *FP8_NAMES),
        parse=lambda text: "fp8" if text in FP8_NAMES else text,
    )
    index_cache_dtype: str | None = flag(
        "--index-cache-dtype",
        "Format of the indexer's keys and queries; where it is not given, that of the latents",
        choices=INDEX_DTYPES,
        stability=Stability.EXPERIMENTAL,
    )
    weights_residency: str | None = flag(
        "--weights-residency",
        "Keep quantised weights as stored, or expand them once into the compute format",
        choices=tuple(Residency),
        stability=Stability.EXPERIMENTAL,
    )
    tensor_parallel_size: int | None = flag(
        "--tensor-parallel-size",
        "Ranks that share the model: processes on the CPU, or one on each GPU",
        aliases=("-tp", "--tp-size", "--tp"),
        unit="ranks",
    )
    prefill_context_parallel_size: int | None = flag(
        "--prefill-context-parallel-size",
        "Of these ranks, how many share the tokens of long prompts; each of them keeps whole"
        " attention weights, and decoding still divides heads over all",
        aliases=("-pcp", "--attn-cp-size"),
        unit="ranks",
    )
    decode_context_parallel_size: int | None = flag(
        "--decode-context-parallel-size",
        "Of these ranks, over how many the entries and index keys of a sequence are divided; each"
        " then keeps a part of its tokens, and a longer context fits",
        aliases=("-dcp",),
        unit="ranks",
    )
    wire_dtype: str | None = flag(
        "--wire-dtype",
        "Format in which ranks add up rows of prompts: 8 bits halve what travels; where it is not"
        " given, `bench quality` must have passed them for this model and so many ranks",
        choices=WIRES,
        stability=Stability.EXPERIMENTAL,
    )
    pipeline_parallel_size: int | None = flag(
        "--pipeline-parallel-size",
        "Stages, each with some of the layers and ranks of its own, which are at work on different"
        " requests or chunks of a prompt",
        aliases=("-pp", "--pp-size"),
        unit="stages",
    )
    enable_expert_parallel: bool = flag(
        "--enable-expert-parallel",
        "Deal whole experts over the ranks of a stage instead of a slice of each expert to each",
        False,
    )
    expert_parallel_size: int | None = flag(
        "--expert-parallel-size",
        "Parts of a stage's ranks over which whole experts are dealt; the ranks of a part divide"
        " the width of its experts",
        aliases=("--ep-size", "--ep"),
        unit="parts",
    )
    max_model_len: int | None = flag(
        "--max-model-len",
        "Longest sequence, prompt and output together",
        aliases=("--context-length",),
        unit="tokens",
    )
    max_num_seqs: int | None = flag(
        "--max-num-seqs",
        "Sequences that run at once",
        aliases=("--max-running-requests",),
        unit="n",
    )
    max_num_batched_tokens: int | None = flag(
        "--max-num-batched-tokens",
        "Tokens of one step; longer prompts are prefilled in chunks",
        aliases=("--chunked-prefill-size",),
        unit="tokens",
    )
    max_queued_requests: int | None = flag(
        "--max-queued-requests",
        "Requests that may wait beyond those that run; more are answered with 429",
        unit="n",
    )
    memory_utilization: float | None = flag(
        "--memory-utilization",
        "Share of the free memory that the engine may take, above 0 and at most 1",
        aliases=("--gpu-memory-utilization", "--mem-fraction-static"),
        unit="share",
    )
    num_blocks_override: int | None = flag(
        "--num-blocks",
        "Cache blocks (128 tokens each), whatever the memory",
        aliases=("--num-gpu-blocks-override",),
        unit="blocks",
    )
    kernel_order: str | None = flag(
        "--kernel-order",
        "Implementations to try, best first, as 'op=backend,backend;*=...'; on a GPU the slow"
        " reference runs only where it is named, as in '*=triton,reference'",
        stability=Stability.EXPERIMENTAL,
    )
    tuned_kernels: bool | None = flag(
        "--tuned-kernels",
        "Choose implementations by the times that `metainfer kernels tune` kept for this card",
        stability=Stability.EXPERIMENTAL,
    )
    async_scheduling: bool | None = flag(
        "--async-scheduling",
        "Launch a step before the results of the one before are read; a GPU then waits less",
    )
    decode_share: float | None = flag(
        "--decode-share",
        "Share of the time for decoding alone while prompts wait, at least 0 and below 1; 0: every"
        " step may hold rows of prompts",
        unit="share",
        stability=Stability.EXPERIMENTAL,
    )
    longest_prefill_s: float | None = flag(
        "--longest-prefill",
        "Longest time that a step with rows of prompts may take while others decode",
        unit="s",
        stability=Stability.EXPERIMENTAL,
    )
    enforce_eager: bool = flag(
        "--enforce-eager",
        "Start the kernels of decode steps one by one instead of replaying CUDA graphs",
        False,
        aliases=("--disable-cuda-graph",),
    )
    cuda_graph_sizes: tuple[int, ...] = flag(
        "--cuda-graph-sizes",
        "Rows of the decode steps that are captured as CUDA graphs; a single number is the largest"
        " of the usual sizes",
        (),
        aliases=("--cuda-graph-bs",),
        unit="rows",
        many=True,
    )
    threads: int | None = flag("--threads", "CPU threads of one step", unit="n")

    def __post_init__(self) -> None:
        _require_choice("--load-format", self.load_format, tuple(LoadFormat))
        if self.device is not None:
            parse_device(self.device)
        if self.code_for is not None:
            parse_portable(self.code_for)
        _require_choice("--dtype", self.dtype, DTYPES)
        _require_choice("--activations", self.activations, ACTIVATIONS)
        given = self.shared_expert_stream
        if given is not None and given not in SWITCH and not (given.isdecimal() and int(given)):
            raise UserError(f"--shared-expert-stream {given} is not on, off or a number of rows")
        _require_choice("--kv-cache-dtype", self.kv_cache_dtype, LATENT_DTYPES)
        _require_choice("--index-cache-dtype", self.index_cache_dtype, INDEX_DTYPES)
        _require_choice("--wire-dtype", self.wire_dtype, WIRES)
        _require_choice("--weights-residency", self.weights_residency, tuple(Residency))
        _require_least("--tensor-parallel-size", self.tensor_parallel_size, 1)
        _require_least("--prefill-context-parallel-size", self.prefill_context_parallel_size, 1)
        _require_least("--decode-context-parallel-size", self.decode_context_parallel_size, 1)
        _require_least("--pipeline-parallel-size", self.pipeline_parallel_size, 1)
        _require_least("--expert-parallel-size", self.expert_parallel_size, 1)
        # One token of prompt and one of output.
        _require_least("--max-model-len", self.max_model_len, 2)
        _require_least("--max-num-seqs", self.max_num_seqs, 1)
        # Prefill and decode each need a row of every step.
        _require_least("--max-num-batched-tokens", self.max_num_batched_tokens, 2)
        _require_least("--max-queued-requests", self.max_queued_requests, 0)
        _require_least("--num-blocks", self.num_blocks_override, 1)
        _require_least("--threads", self.threads, 1)
        for size in self.cuda_graph_sizes:
            _require_least("--cuda-graph-sizes", size, 1)
        if self.decode_share is not None and not 0.0 <= self.decode_share < 1.0:
            raise UserError(f"--decode-share {self.decode_share:g} is not at least 0 and below 1")
        if self.longest_prefill_s is not None and not self.longest_prefill_s > 0.0:
            raise UserError(f"--longest-prefill {self.longest_prefill_s:g} is not above 0")
        share = self.memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise UserError(f"--memory-utilization {share:g} is not above 0 and at most 1")


def _require_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise UserError(f"{name} {value} is not one of {', '.join(choices)}")


def _require_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"{name} {value} is below {least}")
