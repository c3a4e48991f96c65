"""How matrices are stored, one frozen record per format: read, sliced, stacked, dequantised."""

from metainfer.weights.formats.dense import DenseWeight
from metainfer.weights.formats.fp4_group import Fp4GroupWeight, encode_fp4_group
from metainfer.weights.formats.fp8_block import Fp8BlockWeight, encode_fp8_block
from metainfer.weights.formats.parts import Weight, part_of

__all__ = [
    "DenseWeight",
    "Fp4GroupWeight",
    "Fp8BlockWeight",
    "Weight",
    "encode_fp4_group",
    "encode_fp8_block",
    "part_of",
]
