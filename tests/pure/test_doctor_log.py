"""`doctor --log`: real kinds of logs, files of every state, one line without end."""

from __future__ import annotations

import gzip
import io
import json
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import UserError
from metainfer.doctor.logs.lines import LINE_BYTES, Reading, read_lines
from metainfer.doctor.logs.pattern import load_known
from metainfer.doctor.logs.scan import excerpt, scan
from tests.fakes.command import metainfer

KNOWN = load_known()
VLLM = """\
INFO 09-01 10:00:00 [__init__.py:216] Automatically detected platform cuda.
(APIServer pid=1) INFO 09-01 10:00:01 [api_server.py:1896] vLLM API server version 0.29.0
(APIServer pid=1) INFO [utils.py:328] non-default args: {'model': 'm', 'tensor_parallel_size': 4}
(Worker_TP0 pid=7) INFO 09-01 10:00:04 [pynccl.py:113] vLLM is using nccl==2.30.4
(Worker_TP0 pid=7) WARNING 09-01 10:00:05 [symm_mem.py:66] SymmMemCommunicator: Device capability\
 12.0 not supported, communicator is not available.
(Worker_TP0 pid=7) WARNING 09-01 10:00:05 [custom_all_reduce.py:134] Custom allreduce is disabled\
 because it's not supported on more than two PCIe-only GPUs. To silence this warning, specify
(Worker_TP1 pid=8) WARNING 09-01 10:00:05 [custom_all_reduce.py:134] Custom allreduce is disabled\
 because it's not supported on more than two PCIe-only GPUs. To silence this warning, specify
(Worker_TP0 pid=7) WARNING [fused_moe.py:1071] Using default MoE config. Performance might be\
 sub-optimal! Config file not found at ['/c/E=256,N=512,device_name=NVIDIA_RTX_PRO_6000.json']
(Worker_TP0 pid=7) INFO [monitor.py:34] torch.compile takes 18.85 s in total
(EngineCore pid=3) INFO [kv_cache_utils.py:1708] GPU KV cache size: 1,020,992 tokens
(EngineCore pid=3) INFO [kv_cache_utils.py:1712] Maximum concurrency for 393,216 tokens per\
 request: 2.60x
(EngineCore pid=3) INFO [shm_broadcast.py:501] No available shared memory broadcast block found\
 in 60 seconds.
(APIServer pid=1) INFO:     Application startup complete.
(EngineCore pid=3) WARNING [jit_monitor.py:103] Triton kernel JIT compilation during inference:\
 _zero_kv. This causes a latency spike
(APIServer pid=1) INFO [loggers.py:250] Engine 000: Avg prompt throughput: 1932.0 tokens/s, Avg\
 generation throughput: 80.0 tokens/s, Running: 1 reqs, Prefix cache hit rate: 0.0%
(APIServer pid=1) INFO [loggers.py:250] Engine 000: Avg prompt throughput: 46100.5 tokens/s, Avg\
 generation throughput: 80.0 tokens/s, Running: 1 reqs, Prefix cache hit rate: 88.1%
"""
SGLANG = """\
[2026-09-01 10:00:00] server_args=ServerArgs(model_path='m', disable_cuda_graph=False,\
 mem_fraction_static=0.88, api_key='sk-very-secret', disable_custom_all_reduce=False)
[2026-09-01 10:00:09 TP0] max_total_num_tokens=110964, chunked_prefill_size=8192,\
 max_prefill_tokens=16384, max_running_requests=2048, context_len=1048576, available_gpu_mem=0.53 GB
[2026-09-01 10:00:19] The server is fired up and ready to roll!
[2026-09-01 10:00:20 TP0] Prefill batch, #new-seq: 1, #new-token: 1000, #cached-token: 0, token
[2026-09-01 10:00:21 TP0] Prefill batch, #new-seq: 1, #new-token: 1000, #cached-token: 6000, token
[2026-09-01 10:00:22 TP0] Decode batch, #running-req: 5, #token: 87, cuda graph: False, gen
[2026-09-01 10:00:22 TP0] Decode batch, #running-req: 66, #token: 87, cuda graph: False, gen
[2026-09-01 10:00:22 TP0] Decode batch, #running-req: 7, #token: 87, cuda graph: False, gen
[2026-09-01 10:00:23 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1
"""
NCCL = """\
box:10:20 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
box:10:20 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
box:10:20 [0] NCCL INFO NET/IB : No device found.
box:10:20 [0] NCCL INFO NVLS multicast support is not available on dev 0
box:10:20 [0] NCCL INFO Check P2P Type isAllDirectP2p 0 directMode 0 isAllCudaP2p 1
box:10:20 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
box:10:20 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
box:10:20 [0] NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels, 2 p2p channels, 2\
 p2p channels per peer
box:10:20 [0] NCCL INFO AllReduce: 4 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}
box:10:20 [0] NCCL INFO AllReduce: 8388608 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}
"""
OWN = """\
10:00:00 info llm.graphs: 24 graphs of decode steps were made in 8.1 s and took 1.2 GB
10:00:01 info llm.engine: deepseek-v4-flash is ready after 41.0 s
10:00:09 warning kernels.gpu.compilations: the kernel a was compiled while requests were served
10:00:09 warning kernels.gpu.compilations: the kernel b was compiled while requests were served
{"time": 1.0, "level": "error", "logger": "metainfer.llm.loop", "message": "step 8 failed"}
"""


def scanned(data: bytes | str):
    return scan(io.BytesIO(data if isinstance(data, bytes) else data.encode()), KNOWN)


def seen(report) -> dict[str, tuple[int, int]]:
    """Id -> (first line, how many)."""
    return {one.pattern.id: (one.first_line, one.count) for one in report.sightings}


def lines_of(data: bytes) -> list[tuple[int, str]]:
    return list(read_lines(io.BytesIO(data), Reading()))


def said(report, name: str) -> str:
    (finding,) = [one for one in report.findings if one.check == f"log: {name}"]
    return finding.what


def test_a_log_of_vllm():
    report = scanned(VLLM)
    assert seen(report) == {
        "allreduce-pcie": (6, 2), "vllm-jit-in-service": (14, 1), "moe-config-missing": (8, 1),
        "vllm-symm-mem-capability": (5, 1), "vllm-kv-size": (10, 1), "vllm-kv-concurrency": (11, 1),
        "vllm-broadcast-loading": (12, 1), "vllm-prefix-hits": (16, 1),
    }  # fmt: skip
    assert report.versions == {"vLLM": "0.29.0", "NCCL": "2.30.4"}
    assert "46100.5" in said(report, "vllm-prefix-hits")
    assert "NVIDIA_RTX_PRO_6000)" in report.sightings[2].finding().fix


def test_what_is_compiled_while_it_serves_is_another_thing_and_a_restart_loads_again():
    compiled = "INFO [monitor.py:34] torch.compile takes 18.85 s in total\n"
    assert seen(scanned(VLLM + compiled))["vllm-compile-in-service"] == (17, 1)
    assert "vllm-compile-in-service" not in seen(scanned(VLLM + VLLM))


def test_a_log_of_sglang():
    report = scanned(SGLANG)
    assert seen(report) == {
        "sglang-cache-below-context": (2, 1), "sglang-memory-left": (2, 1),
        "sglang-decode-without-graph": (6, 3), "sglang-retraction": (9, 1),
        "sglang-memory-fraction": (1, 1), "sglang-cache-size": (2, 1),
        "sglang-prefix-hits": (4, 2),
    }  # fmt: skip
    assert said(report, "sglang-prefix-hits").startswith("75 % of the prompt tokens")
    assert "66 requests" in said(report, "sglang-decode-without-graph")
    assert report.versions == {"SGLang": ""}


def test_a_piece_of_a_log_tells_its_engine_too():
    nccl = "[2026-09-01 10:00:00 TP0] sglang is using nccl==2.27.5"
    assert scanned(nccl).versions == {"SGLang": "", "NCCL": "2.27.5"}
    later = "vLLM is using nccl==2.30.4\n[core.py:109] Initializing a V1 LLM engine (v0.20.2) with"
    assert scanned(later).versions == {"vLLM": "0.20.2", "NCCL": "2.30.4"}
    backend = "Using FlashInfer CUTLASS Unquantized MoE backend out of potential backends: []"
    assert "(Unquantized) are computed by FlashInfer CUTLASS" in said(
        scanned(backend), "vllm-moe-backend"
    )


def test_a_log_of_nccl():
    report = scanned(NCCL)
    assert seen(report) == {
        "nccl-p2p-unused": (5, 1), "nccl-via-shm": (6, 2), "nccl-channels": (8, 1),
        "nccl-no-plugin": (2, 1), "nccl-no-ib": (3, 1), "nccl-nvls": (4, 1),
        "nccl-algorithm": (9, 2),
    }  # fmt: skip
    assert "8388608 bytes, takes algorithm RING" in said(report, "nccl-algorithm")
    assert report.versions == {"NCCL": "2.28.9"}


def test_a_log_of_this_engine_as_text_and_as_json():
    report = scanned(OWN)
    assert list(seen(report)) == [
        "metainfer-step-failed", "metainfer-compiled-in-service", "metainfer-graphs",
    ]  # fmt: skip
    assert said(report, "metainfer-step-failed") == "the engine says: step 8 failed"
    assert report.versions == {"metainfer": ""}


def test_colours_prefixes_redrawn_lines_and_bad_bytes_hide_nothing():
    line = "Cudagraph \x1b[1;32mis\x1b[0m disabled under eager\x1b]0;title\x07 mode"
    data = b"\xff\xfe\x00\x9d\xc3\r 10%\r 20%\r(W pid=7)\xe9 " + line.encode() + b"\r\nend"
    report = scanned(b"\n\n" + data)
    assert seen(report) == {"vllm-eager-mode": (3, 1)}
    assert report.reading.num_lines == 4


def test_line_numbers_are_those_of_editors():
    assert lines_of(b"a\n\nb\r\nc\rd\n\ne") == [(1, "a"), (3, "b"), (4, "c"), (4, "d"), (6, "e")]
    assert lines_of(b"") == [] and lines_of(b"\n") == []
    assert lines_of(b"\xef\xbb\xbfa\0b") == [(1, "ab")]


@pytest.mark.parametrize("coding", ["utf-16-le", "utf-16-be"])
def test_logs_of_windows_shells(coding):
    data = "\ufeffeins\r\nzwei \N{EURO SIGN}".encode(coding)
    assert lines_of(data) == [(1, "eins"), (2, "zwei \N{EURO SIGN}")]


class Piecewise(io.RawIOBase):
    """A stream that gives as little at a time as a pipe may."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data, self._sizes = data, sizes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        size = min(len(buffer), self._sizes.pop() if self._sizes else 2**16)
        piece, self._data = self._data[:size], self._data[size:]
        buffer[: len(piece)] = piece
        return len(piece)


@given(
    st.lists(st.sampled_from([b"ab", b"\n", b"\r", b"\r\n", b"\x1b[1m", b"\xc3", b"\xa9", b"\0"])),
    st.lists(st.integers(1, 5)),
)
def test_how_a_pipe_cuts_a_log_changes_nothing(parts, sizes):
    data = b"start" + b"".join(parts)
    assert list(read_lines(Piecewise(data, sizes), Reading())) == lines_of(data)


def test_one_in_thousands_of_lines_is_found_where_it_is():
    others = [f"INFO: 10.0.0.{n % 250} GET /health 200" for n in range(9_999)]
    others[7_000] = "x is preempted by PreemptionMode.SWAP mode"
    report = scanned("\n".join(others))
    assert seen(report) == {"vllm-preempted": (7_001, 1)} and report.reading.num_lines == 9_999


def test_a_line_without_end_takes_no_memory_and_hides_no_other():
    class Endless(io.RawIOBase):
        left = 400

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            self.left -= 1
            piece = b"x" * min(len(buffer), 2**17)
            piece = b"\nCudagraph is disabled under eager mode\n" if self.left == 0 else piece
            buffer[: len(piece)] = piece
            return len(piece) if self.left >= 0 else 0

    tracemalloc.start()
    report = scan(Endless(), KNOWN)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen(report) == {"vllm-eager-mode": (2, 1)} and peak < 8 * 2**20
    assert report.reading.num_clipped == 1 and report.reading.num_lines == 2
    assert len(lines_of(b"y" * 3 * LINE_BYTES)[0][1]) == LINE_BYTES


def test_random_bytes_are_nothing_known():
    report = scanned(b"Q" + random.Random(5).randbytes(2**19))
    assert report.sightings == () and report.reading.broken == ""


def test_gzip_whole_in_parts_cut_off_and_damaged():
    packed = gzip.compress(VLLM.encode())
    assert seen(scanned(packed)) == seen(scanned(VLLM))
    assert scanned(packed + gzip.compress(OWN.encode())).versions["metainfer"] == ""
    noise = random.Random(1).randbytes(2**18).hex().encode()
    long = gzip.compress(VLLM.encode() + noise)
    cut = scanned(long[:-1000])
    assert cut.reading.broken == "it is cut off" and "allreduce-pcie" in seen(cut)
    damaged = bytearray(long)
    damaged[-200_000:-199_000] = b"\xff" * 1000
    report = scanned(bytes(damaged))
    assert report.reading.broken.startswith("its compression is damaged")
    assert "allreduce-pcie" in seen(report)


def test_other_compressions_are_refused_with_the_command_that_helps():
    with pytest.raises(UserError) as caught:
        scanned(b"\x28\xb5\x2f\xfd rest")
    assert caught.value.hint == "zstd -dc FILE | metainfer doctor --log -"


def test_keys_and_control_characters_are_not_shown():
    args = "[t] server_args=ServerArgs(api_key='sk-secret', mem_fraction_static=0.88)"
    report = scanned(args + "\n{'api-key': 1}")
    assert "sk-secret" not in report.findings[0].evidence
    assert "api_key='*********'" in report.findings[0].evidence
    for told in (
        "run --api-key sk-1 x", "'--api-key', 'sk-1'", "Authorization: Bearer sk-1",
        "api_key=['sk-0', 'sk-1']", "--hf-token sk-1", "HUGGING_FACE_HUB_TOKEN=sk-1",
        "--ssl-keyfile-password sk-1", "AWS_SECRET_ACCESS_KEY=sk-1",
    ):  # fmt: skip
        assert "sk-1" not in excerpt(told, 0), told
    plain = "max_total_num_tokens=12345, --max-num-batched-tokens 8192, token usage: 0.3"
    assert excerpt(plain, 0) == plain
    assert excerpt("a\x07b\u202ec", 0) == "a b c"
    far = excerpt("x" * 500 + "found" + "y" * 500, 500)
    assert far.startswith("...x") and far.endswith("y...") and "found" in far and len(far) < 210


def read(path, *more: str) -> tuple[int, str]:
    ran = metainfer("doctor", "--log", str(path), *more)
    assert ran.err == ""
    return ran.code, ran.out


@pytest.mark.parametrize(
    ("log", "code", "ends"),
    [
        (VLLM, 1, "0 failed, 2 warnings, 1 to be measured, 5 notes"),
        (OWN, 2, "1 failed, 1 warnings, 0 to be measured, 1 notes"),
        ("hello\nworld\n", 0, f"none of the {len(KNOWN.patterns)} kinds of lines that are known"),
        ("NVLS multicast support is not available\n", 0, "0 to be measured, 1 notes"),
        ("", 0, "are known here"),
    ],
)
def test_what_is_printed(tmp_path, log, code, ends):
    (tmp_path / "server.log").write_text(log)
    got, text = read(tmp_path / "server.log")
    assert got == code and ends in text.splitlines()[-1]
    assert all(len(line) <= 100 for line in text.splitlines()[1:])
    assert ("nothing known found" in text) == (log in ("", "hello\nworld\n"))


def test_the_record(tmp_path):
    (tmp_path / "server.log.gz").write_bytes(gzip.compress(SGLANG.encode()))
    code, text = read(tmp_path / "server.log.gz", "--json")
    record = json.loads(text)
    assert code == record["exit_code"] == 1 and record["lines"] == 9
    assert record["engines"] == {"SGLang": ""} and record["broken"] == ""
    first = record["findings"][0]
    assert first["id"] == "sglang-cache-below-context" and first["line"] == 2
    assert first["fields"] == {"tokens": "110964", "context": "1048576", "count": "1"}
    assert all(set(one) == set(first) for one in record["findings"])


def test_stdin_and_mistakes(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(NCCL.encode())))
    code, text = read("-")
    assert code == 1 and text.startswith("the log on stdin: 10 lines of NCCL 2.28.9")
    for log in (str(tmp_path / "none.log"), str(tmp_path), "/proc/self/mem"):
        ran = metainfer("doctor", "--log", log)
        assert ran.code == 2 and ran.err.startswith(f"error: --log: {log} cannot be read: ")
        assert ran.err.count("\n") == 1
    ran = metainfer("doctor", "--log", "a", "--model", "deepseek-v4-flash")
    assert ran.code == 2 and "--log is about a log alone" in ran.err
    monkeypatch.setattr("sys.stdin", None)
    ran = metainfer("doctor", "--log", "-")
    assert ran.code == 2 and "stdin, which is closed" in ran.err
    ran = metainfer("doctor", "--log", "")
    assert ran.code == 2 and "--log names no file" in ran.err
    for more in (("--log", "a"), ("--port", "5"), ("--json",)):
        ran = metainfer("doctor", "--list", *more)
        assert ran.code == 2 and "--list is about the checks alone" in ran.err
