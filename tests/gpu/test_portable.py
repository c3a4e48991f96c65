"""The code of older GPUs, from its PTX, on this one."""

from __future__ import annotations

import threading

import pytest
import torch

from metainfer.kernels.triton.portable import PtxLauncher
from metainfer.ops.targets import PORTABLE
from tests.compiled.kernels import product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.fixture(params=PORTABLE, ids=str)
def launch(request: pytest.FixtureRequest) -> PtxLauncher:
    if request.param > torch.cuda.get_device_capability():
        pytest.skip("this GPU is older")
    return PtxLauncher(request.param)


def multiply(launch: PtxLauncher, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    sizes = {"M": len(a), "N": len(b)}
    launch(product, (1,), a, b, c, a.shape[1], TYPE=None, **sizes, num_warps=8, num_stages=3)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = torch.randn(2, 128, 512, device="cuda", dtype=torch.bfloat16)
    return a, b, torch.full((128, 128), torch.nan, device="cuda")


def test_a_product_is_right(launch: PtxLauncher) -> None:
    a, b, c = operands()
    multiply(launch, a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-2)


def test_a_graph_replays_what_was_compiled(launch: PtxLauncher) -> None:
    a, b, c = operands()
    multiply(launch, a, b, c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(launch, a, b, c)
    a.normal_()
    graph.replay()
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-2)


def test_a_thread_that_never_used_the_gpu_can_launch(launch: PtxLauncher) -> None:
    a, b, c = operands()
    thread = threading.Thread(target=multiply, args=(launch, a, b, c))
    thread.start()
    thread.join()
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-2)
