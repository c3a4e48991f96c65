"""What a launch compiles is what Triton's own just-in-time compiler would compile."""

from __future__ import annotations

import pickle

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from metainfer.comm.move_kernel import Address, start_move
from metainfer.core.errors import MetainferError
from metainfer.kernels.triton.record import CompileUnit, RecordingLauncher, unit_of
from tests.compiled.kernels import everything, product

ALIGNED, APART = torch.empty(128), torch.empty(129)[1:]
BRAIN, EIGHT = ALIGNED.to(torch.bfloat16), ALIGNED.to(torch.float8_e4m3fn)
ROWS = (
    (ALIGNED, APART, 16, 1, 16, 16, 1.0, True, 2, None),
    (APART.bool(), ALIGNED.byte(), 1, 16, 1, 1, 1.0, False, 2.0, BRAIN),
    (ALIGNED.long(), ALIGNED.int(), 7, 2**31, 48, 2**40, 3.5, True, 1, APART),
    (ALIGNED.half(), EIGHT, 0, 0, 0, 0, 2, 1, 1, 2**63),
    (ALIGNED.short(), ALIGNED.char(), -(2**31), -1, -16, -16, 1, 0, 0.0, 2**31 - 1),
)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_a_unit_is_specialised_as_triton_does(row: int) -> None:
    arguments = ROWS[row]
    unit, runtime = unit_of(everything, arguments, {"BLOCK": 64, "num_warps": 2})
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(everything.signature, everything.params, backend)
    bound, theirs, _ = bind(*arguments, BLOCK=64)
    assert unit.signature == tuple(kind for kind, _ in theirs)
    assert unit.divisible == tuple(n for n, (_, note) in enumerate(theirs) if note == "D")
    named = {
        name: v
        for (name, v), (kind, _) in zip(bound.items(), theirs, strict=True)
        if kind == "constexpr"
    }
    assert unit.named_constants() == named
    assert [id(v) for v in runtime] == [id(v) for n, v in bound.items() if n not in named]
    assert dict(unit.options) == {"num_warps": 2}


def test_tensors_without_memory_give_the_same_units() -> None:
    here, meta = RecordingLauncher((9, 0), 132), RecordingLauncher((9, 0), 132)
    for launch, device in ((here, "cpu"), (meta, "meta")):
        x = torch.zeros(130, device=device)
        for argument in (x, x[1:], x[4:]):
            launch(everything, (2,), argument, x, 3, 1, 16, 0, 1.0, True, 0.0, None, BLOCK=64)
    assert here.units() == meta.units()
    assert [launch.grid for launch in meta.launches] == [(2,)] * 3
    assert len(meta.units()) == 2
    assert hash(here.units()[0]) == hash(meta.units()[0])


def test_an_address_is_what_a_tensor_there_would_be() -> None:
    """Of memory that this process reaches and that is no tensor's, such as another GPU's."""
    whole = torch.zeros(64, dtype=torch.int32)
    for tensor in (whole, whole[1:]):
        of_tensors, of_addresses = RecordingLauncher((9, 0), 132), RecordingLauncher((9, 0), 132)
        start_move(of_tensors, tensor, tensor, 128)
        address = Address(tensor.data_ptr())
        start_move(of_addresses, address, address, 128)
        assert of_tensors.units() == of_addresses.units()
        assert of_addresses.units()[0].signature[:2] == ("*i32", "*i32")


def test_an_empty_grid_is_no_launch() -> None:
    launch = RecordingLauncher((9, 0), 132)
    launch(product, (4, 0), None, None, None, 0, TYPE=None, M=16, N=16)
    assert launch.launches == []


def test_a_unit_travels_and_compiles_to_the_same_code() -> None:
    x = torch.empty(64, 64, dtype=torch.uint8)
    unit, _ = unit_of(
        product,
        (x, x, torch.empty(64, 64), 64),
        {"TYPE": tl.float8e4nv, "M": 64, "N": 64, "num_warps": 4, "num_stages": 2},
    )
    travelled = pickle.loads(pickle.dumps(unit))
    assert isinstance(travelled, CompileUnit)
    assert travelled == unit
    compiled = travelled.compile((9, 0))
    assert "wgmma" in compiled.asm["ptx"]
    assert compiled.asm["ptx"] == unit.compile((9, 0)).asm["ptx"]


def test_what_is_missing_or_given_twice_is_named() -> None:
    x = torch.empty(16)
    with pytest.raises(MetainferError, match="product is not given M"):
        unit_of(product, (x, x, x, 1), {"TYPE": None})
    with pytest.raises(MetainferError, match="product is given K twice"):
        unit_of(product, (x, x, x, 1), {"TYPE": None, "K": 2})
    with pytest.raises(MetainferError, match="K is a list"):
        unit_of(product, (x, x, x, [1]), {"TYPE": None, "M": 16, "N": 16})
    with pytest.raises(MetainferError, match="7 arguments at most"):
        unit_of(product, (x,) * 8, {})
