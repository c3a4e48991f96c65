"""Converts a DeepSeek-V4 checkpoint in the released layout to GGUF, for llama.cpp.

    python convert_gguf.py CHECKPOINT OUT.gguf --converter DIR [--weights released|exact]

DIR holds the packages `convert-hf-to-gguf` and `gguf` (see README.md). Three things of the
converter are changed while it is imported; its files stay as they are:

- Its class for DSpark drafters is left out, since it needs names that gguf 0.19.0 lacks.
- The file gets no tokenizer. llama.cpp knows pre-tokenizers only by name, and none is the shipped
  model's; both engines are given token ids.
- With `--weights exact` every matrix is written as fp32, so that nothing is rounded on the way.
  `released` is the converter's own choice: fp4 experts repacked bit by bit, fp8 matrices requantised
  to Q8_0 (8-bit integers, one fp16 scale per 32), bf16 kept.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_NEEDS_NEWER_GGUF = "DeepseekV4DSparkModel"
_MODULE = "conversion.deepseek"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--converter", type=Path, required=True)
    parser.add_argument("--weights", choices=("released", "exact"), default="released")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.converter))
    module = import_deepseek()
    patch_model(module, exact=arguments.weights == "exact")
    import convert_hf_to_gguf

    sys.argv = ["convert_hf_to_gguf", str(arguments.checkpoint), "--outfile", str(arguments.out)]
    convert_hf_to_gguf.main()


def import_deepseek() -> ModuleType:
    """The converter's module for DeepSeek models, without the class that this gguf cannot serve."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{_MODULE} is not in --converter")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and node.name == _NEEDS_NEWER_GGUF)]
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    exec(compile(tree, spec.origin, "exec"), module.__dict__)
    return module


def patch_model(module: ModuleType, *, exact: bool) -> None:
    """Change what the class for V4 writes: no tokenizer, and fp32 if `exact`."""
    import gguf

    model = module.DeepseekV4Model
    fp32 = gguf.GGMLQuantizationType.F32

    def set_vocab(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("none")
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    model.set_vocab = set_vocab
    if not exact:
        return

    write = model._write_mxfp4_expert_tensor

    def write_expert_tensor(self: Any, bid: int, proj: str, key: Any) -> list[str]:
        """The converter's own, with a writer that unpacks the fp4 blocks."""
        writer = self.gguf_writer
        self.gguf_writer = _Fp32Writer(writer)
        try:
            consumed: list[str] = write(self, bid, proj, key)
        finally:
            self.gguf_writer = writer
        return consumed

    model._write_mxfp4_expert_tensor = write_expert_tensor
    model.tensor_force_quant = lambda *_: fp32


class _Fp32Writer:
    """Writes quantised tensors as the numbers they stand for."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add_tensor(self, name: str, data: Any, raw_dtype: Any) -> None:
        from gguf.quants import dequantize

        self._writer.add_tensor(name, dequantize(data, raw_dtype))


if __name__ == "__main__":
    main()
