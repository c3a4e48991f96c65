"""metainfer and llama.cpp on one checkpoint and CPU: are greedy tokens equal, and how fast are they?

    python compare_llama.py CHECKPOINT --llama-python PYTHON --converter DIR [--out FILE.json]

Four sides take turns, each in a process of its own: metainfer as it runs by default, llama.cpp on
the checkpoint as its converter writes it, and both in fp32 throughout, where no rounding hides a
difference. Prompts are pieces of the documentation that comes with Python, as token ids.
README.md says how to set up llama.cpp.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import agreement
from metainfer.arch.families import read_arch
from metainfer.bench.record import provenance, write_json
from metainfer.core.errors import UserError
from metainfer.hardware.probe import probe
from report import Load, markdown, speeds
from side import Side, SideSpec, running
from tokenizers import Tokenizer

_REST_S = 0.2  # lets the threads of the side that worked before come to rest
_HERE = Path(__file__).parent


def main() -> None:
    arguments = _parse()
    load = Load(
        rounds=arguments.rounds,
        prefill_tokens=arguments.prefill_len,
        decode_context=arguments.decode_context,
        decode_tokens=arguments.decode_len,
        agreement_contexts=tuple(arguments.agreement_contexts),
        agreement_prompts=arguments.agreement_prompts,
        agreement_tokens=arguments.agreement_len,
        threads=arguments.threads,
        ubatch=arguments.ubatch,
        seed=arguments.seed,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="metainfer-gguf-")))
        files = {
            weights: _convert(arguments.checkpoint, folder, arguments.converter, weights)
            for weights in ("released", "exact")
        }
        sides = []
        for spec in _specs(arguments, load, files):
            _say(f"loading {spec.title}")
            sides.append(stack.enter_context(running(spec, load.threads)))
        prompts = Prompts(arguments.checkpoint, load.seed)
        made = {
            **provenance(),
            "command": ["python", *sys.argv],
            "machine": dataclasses.asdict(probe()),
            "checkpoint": arguments.checkpoint.resolve().name,
            "load": dataclasses.asdict(load),
            "gguf_bytes": {weights: file.stat().st_size for weights, file in files.items()},
            "works": speeds(load, *_take_turns(load, sides, prompts)),
            "agreement": _agree(load, sides, prompts),
            "sides": [_about(side) for side in sides],
        }
    if arguments.out is not None:
        write_json(arguments.out, made)
    print(markdown(made))


class Prompts:
    """Pieces of Python's language reference, in the tokens of a checkpoint, behind its first one.

    The text is all topics one after the other, from a place that the key of the prompt chooses.
    """

    def __init__(self, checkpoint: Path, seed: int) -> None:
        file = checkpoint / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{file} is missing", hint="prompts are text: give a whole checkpoint")
        self._seed = seed
        self._first = read_arch(checkpoint).bos_token_id
        text = "\n".join(topics[name] for name in sorted(topics))
        self._ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids

    def draw(self, key: str, length: int) -> list[int]:
        start = random.Random(f"{self._seed}/{key}").randrange(len(self._ids) - length)
        return [self._first, *self._ids[start : start + length - 1]]


def _take_turns(
    load: Load, sides: list[Side], prompts: Prompts
) -> tuple[list[str], dict[tuple[str, str], list[float]]]:
    """The sides' titles, and tokens a second of (work, side) in each round."""
    rates: dict[tuple[str, str], list[float]] = {}
    for round_number in range(load.rounds + 1):  # round 0 warms up and is not kept
        _say(f"round {round_number} of {load.rounds}")
        for do, tokens, count in load.works():
            prompt = prompts.draw(f"{round_number}/{do}", tokens)
            for side in sides if round_number % 2 else sides[::-1]:
                time.sleep(_REST_S)
                timing = side.ask(do, prompt, count)
                if round_number:
                    rate = timing["tokens"] / timing["seconds"]
                    rates.setdefault((do, side.title), []).append(rate)
    return [side.title for side in sides], rates


def _agree(load: Load, sides: list[Side], prompts: Prompts) -> list[dict[str, Any]]:
    """Each engine side against each peer side: what fp32 has in common is not due to rounding."""
    drawn = [
        prompts.draw(f"agree/{number}/{length}", length)
        for length in load.agreement_contexts
        for number in range(load.agreement_prompts)
    ]
    made = []
    for engine in sides[::2]:
        for peer in sides[1::2]:
            _say(f"comparing greedy tokens of {engine.title} and {peer.title}")
            made.append(agreement.compare(engine, peer, drawn, load.agreement_tokens))
    return made


def _about(side: Side) -> dict[str, Any]:
    return {
        "title": side.title,
        "load_s": side.load_s,
        "peak_bytes": side.peak_bytes(),
        **side.about,
    }


def _specs(arguments: argparse.Namespace, load: Load, files: Mapping[str, Path]) -> list[SideSpec]:
    """metainfer and llama.cpp as they come, then both in fp32."""
    common = {"threads": load.threads, "max_model_len": load.longest()}
    directory = str(arguments.checkpoint)

    def engine(title: str, dtype: str | None) -> SideSpec:
        setup = {**common, "directory": directory, "dtype": dtype}
        return SideSpec(title, Path(sys.executable), "engine_worker.py", setup)

    def peer(title: str, weights: str) -> SideSpec:
        setup = {**common, "gguf": str(files[weights]), "exact": weights == "exact"}
        setup["ubatch"] = load.ubatch
        return SideSpec(title, arguments.llama_python, "llama_worker.py", setup)

    return [
        engine("metainfer", None),
        peer("llama.cpp", "released"),
        engine("metainfer fp32", "float32"),
        peer("llama.cpp fp32", "exact"),
    ]


def _convert(checkpoint: Path, folder: Path, converter: Path, weights: str) -> Path:
    _say(f"converting to GGUF, {weights} weights")
    file = folder / f"{weights}.gguf"
    command = [sys.executable, _HERE / "convert_gguf.py", checkpoint, file]
    command += ["--converter", converter, "--weights", weights]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"{checkpoint} could not be converted to GGUF",
            hint="\n".join(done.stderr.strip().splitlines()[-8:]),
        )
    return file


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--llama-python", type=Path, required=True, help="has llama-cpp-python")
    parser.add_argument("--converter", type=Path, required=True, help="see convert_gguf.py")
    parser.add_argument("--out", type=Path, help="where the JSON record goes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prefill-len", type=int, default=2048)
    parser.add_argument("--decode-context", type=int, default=256)
    parser.add_argument("--decode-len", type=int, default=64)
    parser.add_argument("--agreement-contexts", type=int, nargs="+", default=[8, 100, 600, 2000])
    parser.add_argument("--agreement-prompts", type=int, default=4, help="of each context")
    parser.add_argument("--agreement-len", type=int, default=64)
    parser.add_argument("--ubatch", type=int, default=512, help="llama.cpp's physical batch")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"{error.message}\n{error.hint or ''}".strip()) from error
