"""`metainfer weights synth`: a random checkpoint of any model, in the released format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import REQUIRED, flag
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_least
from metainfer.core.units import format_bytes

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_GENERATION_FILE = "generation_config.json"  # goes with them where there is one


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """What is written, and where to."""

    directory: Path = flag("DIRECTORY", "Where to write; must not exist, or be empty", REQUIRED)
    config: str = flag(
        "--config", "A known model, a checkpoint directory or a config.json", "pebble", unit="model"
    )
    layers: int | None = flag("--layers", "Only so many of the model's first layers", unit="n")
    seed: int = flag("--seed", "Another seed gives other weights", 0)
    max_shard_bytes: int = flag(
        "--max-shard-bytes", "Size of a file; 4G is 4 GiB", 4 * 2**30, unit="bytes"
    )
    tokenizer: Path | None = flag(
        "--tokenizer", "A directory whose tokenizer files are copied, so that it can be served"
    )

    def __post_init__(self) -> None:
        require_least("--layers", self.layers, 1)
        require_least("--max-shard-bytes", self.max_shard_bytes, 1)


def run(terminal: Terminal, options: SynthOptions) -> int:
    from metainfer.arch.families import read_arch
    from metainfer.arch.manifest import total_bytes
    from metainfer.weights.synth import write_checkpoint

    overrides = None if options.layers is None else {"num_hidden_layers": options.layers}
    arch = read_arch(options.config, overrides)
    tokenizer_files = _tokenizer_files(options.tokenizer)
    terminal.say(f"{arch.name}: {format_bytes(total_bytes(arch))} of random weights")
    with terminal.progress("written") as progress:
        write_checkpoint(
            options.directory,
            arch,
            options.seed,
            options.max_shard_bytes,
            progress.update,
            tokenizer_files,
        )
    terminal.data(str(options.directory))
    return 0


def _tokenizer_files(directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    files = [directory / name for name in _TOKENIZER_FILES]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} does not exist")
    generation = directory / _GENERATION_FILE
    return [*files, generation] if generation.is_file() else files


VERB = Verb(
    "weights synth",
    "Write a random checkpoint of a model",
    (("what is written", SynthOptions),),
    run,
    (
        "metainfer weights synth /tmp/random-pebble",
        "metainfer weights synth /data/random-v4-flash --config deepseek-v4-flash --seed 1",
        "metainfer weights synth /data/v4-flash-12 --config deepseek-v4-flash --layers 12",
    ),
)
