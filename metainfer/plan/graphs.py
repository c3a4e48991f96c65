"""Graphs: the fixed shapes of decode steps on a GPU, and what they take.

A graph is captured for each pair of a number of rows and a longest context, so that short contexts
and few sequences do not pay for what is possible at most.
"""

from __future__ import annotations

from collections.abc import Iterable

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.arch.record import Arch
from metainfer.core.errors import UserError
from metainfer.ops.cache_formats import CacheFormats
from metainfer.ops.kernel_order import COMPOSED, REFERENCE
from metainfer.plan.ledger import activation_bytes, block_bytes, state_bytes
from metainfer.plan.plan import Origin, Value
from metainfer.plan.ranks import CAPTURABLE, NONE
from metainfer.plan.settings import EngineSettings

_FIRST_CONTEXT = 2048
"""Tokens of the shortest context: up to there, decoding reads little beside the weights."""

GRAPH_LAYER_BYTES = 96 * 2**10
"""Of a graph, for each layer: about 25 kernels with their arguments. A bound, not a measurement;
start-up logs what graphs took."""

GRAPH_WORKSPACE_BYTES = 512 * 2**20
"""Scores of the indexer (256 MiB), partial results of split attention and products."""

_LISTS = 4  # of entries, 8 bytes each, that the index of a step holds at a time


def row_sizes(most: int, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Rows of captured steps, ascending, `most` at most.

    Args:
        given: as vLLM reads --cuda-graph-sizes: one number is the largest size of the usual list,
            several are the list itself.
    """
    if len(given) > 1:
        return tuple(sorted({min(size, most) for size in given}))
    largest = min((most, *given))
    usual = {1, 2, 4, *range(8, largest, 8), largest}
    return tuple(sorted(size for size in usual if size <= largest))


def context_sizes(max_model_len: int) -> tuple[int, ...]:
    """Longest contexts of captured steps in tokens, ascending: powers of two, and the longest."""
    sizes = []
    size = _FIRST_CONTEXT
    while size < max_model_len:
        sizes.append(size)
        size *= 2
    return (*sizes, max_model_len)


def graphs_switch(
    device_name: str, settings: EngineSettings, collectives: str = NONE
) -> Value[str]:
    """Whether decode steps are captured: "on" or "off".

    Args:
        collectives: what carries those of several ranks.

    Raises UserError for flags that contradict each other or the device.
    """
    if settings.cuda_graph_sizes and settings.enforce_eager:
        raise UserError(
            "--cuda-graph-sizes and --enforce-eager contradict each other",
            hint="leave one of them out",
        )
    if device_name != "cuda":
        if settings.cuda_graph_sizes:
            raise UserError(
                "--cuda-graph-sizes: graphs are a GPU's, and this runs on the CPU",
                hint="leave it out",
            )
        return Value("off", Origin.DEFAULT, "a CPU has no graphs")
    if settings.enforce_eager:
        return Value("off", Origin.FLAG, "given with --enforce-eager")
    if collectives not in CAPTURABLE:
        if settings.cuda_graph_sizes:
            raise UserError(
                f"--cuda-graph-sizes: ranks that talk over {collectives} wait for each other on"
                " the host, which no graph can do",
                hint="leave it out",
            )
        return Value(
            "off", Origin.DEFAULT, f"{collectives} waits on the host: no graph can hold it"
        )
    slow = [name for name in (REFERENCE, COMPOSED) if name in (settings.kernel_order or "")]
    if slow:
        reason = f"the kernel order names {slow[0]}, which reads results on the host"
        return Value("off", Origin.FLAG, reason)
    return Value("on", Origin.DEFAULT, "starting its kernels one by one takes longer than a step")


def graph_rows(device_name: str, settings: EngineSettings, most: int) -> Value[tuple[int, ...]]:
    """Rows of decode steps of fixed shapes; none where steps take the shapes that they have."""
    if device_name != "cuda":
        return Value((), Origin.DEFAULT, "on a CPU a step has no more rows than it needs")
    given = settings.cuda_graph_sizes
    sizes = row_sizes(most, given)
    if given:
        return Value(sizes, Origin.FLAG, "given with --cuda-graph-sizes")
    return Value(sizes, Origin.DEFAULT, "padding to the next costs less than a graph for each")


def graph_contexts(device_name: str, max_model_len: int) -> Value[tuple[int, ...]]:
    """Longest contexts of such steps, in tokens."""
    if device_name != "cuda":
        return Value((), Origin.DEFAULT, "on a CPU lists are as long as they need to be")
    reason = "lists of entries are as long as the context, and at most twice what is needed"
    return Value(context_sizes(max_model_len), Origin.MODEL, reason)


def graphs_bytes(
    arch: Arch,
    rows: tuple[int, ...],
    contexts: tuple[int, ...],
    *,
    captured: bool,
    compute_dtype: str,
    caches: CacheFormats,
    draft_rows: int,
    ranks: int = 1,
) -> int:
    """What decode steps of fixed shapes take beside those of any shape: a spare slot and block,
    logits, and the graphs with the memory that they share."""
    if not rows:
        return 0
    most, longest = rows[-1], contexts[-1]
    spare = state_bytes(arch, 1, caches, draft_rows) + block_bytes(arch, caches)
    fixed = spare + most * arch.vocab_size * 4
    if not captured:
        return fixed
    lists = lists_bytes({layer.ratio for layer in arch.layers}, most, longest)
    step = activation_bytes(
        arch, most, most, BLOCK_TOKENS, compute_dtype, GRAPH_WORKSPACE_BYTES, ranks
    )
    return fixed + step + lists + launches_bytes(len(rows) * len(contexts), len(arch.layers))


def lists_bytes(ratios: Iterable[int], rows: int, entries_of: int) -> int:
    """Lists of entries of a step of `rows` rows, as long as a context of `entries_of` tokens.

    Args:
        ratios: tokens per entry; 0 for none.
    """
    return rows * sum(entries_of // ratio for ratio in set(ratios) if ratio) * 8 * _LISTS


def launches_bytes(graphs: int, layers: int) -> int:
    """What so many graphs take by themselves."""
    return graphs * layers * GRAPH_LAYER_BYTES
