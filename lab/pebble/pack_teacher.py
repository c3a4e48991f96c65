"""Repacks a GGUF teacher (Q4_1, Q8_0, F32 tensors) into two safetensors parts of raw blocks.

The parts hold the quantised bytes as they are, so that each stays under 50 MB; `teacher.py`
dequantises them. The tokenizer is written beside them as tokenizer.json.

    python pack_teacher.py SmolLM2-135M-Instruct.Q4_1.gguf OUT_DIR      (needs the gguf package)
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from safetensors.numpy import save_file


def tokenizer_json(reader: GGUFReader) -> dict:
    """The byte-level BPE of the GGUF file as a tokenizers document."""
    field = {k: reader.fields[f"tokenizer.ggml.{k}"].contents() for k in ("tokens", "merges")}
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {"id": i, "content": token, "special": True, **plain}
        for i, (token, kind) in enumerate(zip(field["tokens"], types, strict=True))
        if kind in (3, 4)
    ]
    split = [{"type": "Digits", "individual_digits": True}, {**level, "use_regex": True}]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {token: i for i, token in enumerate(field["tokens"])},
        "merges": [merge.split(" ") for merge in field["merges"]],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": model,
    }


def main() -> None:
    source, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(source)
    parts: list[dict[str, np.ndarray]] = [{}, {}]
    sizes = [0, 0]
    for tensor in sorted(reader.tensors, key=lambda t: -t.data.nbytes):
        n = sizes.index(min(sizes))
        parts[n][f"{tensor.name}|{tensor.tensor_type.name}"] = np.ascontiguousarray(tensor.data)
        sizes[n] += tensor.data.nbytes
    for n, part in enumerate(parts):
        save_file(part, out / f"part{n}.safetensors")
    (out / "tokenizer.json").write_text(json.dumps(tokenizer_json(reader), ensure_ascii=False))
    print(sizes)


if __name__ == "__main__":
    main()
