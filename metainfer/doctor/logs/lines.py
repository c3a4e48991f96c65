"""Lines of a log of any size: bytes in, short clean texts out, in bounded memory."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from metainfer.core.errors import UserError

_CHUNK_BYTES = 2**18
LINE_BYTES = 2**16
"""What of a line is looked at. The arguments that SGLang prints take more than ten thousand."""

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\\u001b\[[0-9;]*m"  # colours in lines of JSON, as containers keep them
    r"|\x1b[@-Z\\^_]"
)
_GZIP = b"\x1f\x8b"
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd -dc", b"\xfd7zXZ": "xz -dc", b"BZh": "bzip2 -dc"}
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(slots=True)
class Reading:
    """How far a log was read.

    Attributes:
        num_lines: ends of lines so far; a last line without one counts.
        num_clipped: lines of which only the beginning was looked at.
        broken: why it could not be read to the end; "" where it was.
    """

    num_lines: int = 0
    num_clipped: int = 0
    broken: str = ""


def read_lines(
    stream: BinaryIO, reading: Reading, on_bytes: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[int, str]]:
    """(number, text) of each line, from 1. What a progress bar has drawn over itself comes as
    several texts of one number. Compression by gzip is undone, in files that are cut off too.

    Args:
        reading: filled in while lines are taken.
        on_bytes: called with the bytes read of `stream`.

    Raises UserError for other compressions.
    """
    chunks = _utf_8(_chunks(stream, reading, on_bytes))
    for number, raw in _split(chunks, reading):
        text = raw.replace(b"\0", b"").decode("utf-8", "replace")
        yield number, _ESCAPES.sub("", text) if "\x1b" in text or "u001b" in text else text


def _chunks(stream: BinaryIO, reading: Reading, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    """Bytes of the log, decompressed; why they end early goes to `reading`."""
    counted = _Counted(stream, on_bytes)
    buffered = io.BufferedReader(counted, _CHUNK_BYTES)
    head = buffered.peek(8)[:8]
    for magic, command in _PACKED.items():
        if head.startswith(magic):
            raise UserError(
                "the log is compressed in a way that is not read here",
                hint=f"{command} FILE | metainfer doctor --log -",
            )
    source = gzip.GzipFile(fileobj=buffered) if head.startswith(_GZIP) else buffered
    try:
        while chunk := source.read1(_CHUNK_BYTES):
            yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        cut_off = isinstance(error, EOFError)
        reading.broken = "it is cut off" if cut_off else f"its compression is damaged: {error}"


class _Counted(io.RawIOBase):
    """A stream that tells how much of it was read."""

    def __init__(self, stream: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._stream = stream
        self._on_bytes = on_bytes
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        # One read of what is there: a log that is still being written is not waited for.
        read = getattr(self._stream, "read1", self._stream.read)
        data: bytes = read(len(buffer))
        buffer[: len(data)] = data
        self._num_bytes += len(data)
        self._on_bytes(self._num_bytes)
        return len(data)


def _utf_8(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Files of UTF-16, as shells of Windows write them, become UTF-8; others stay as they are."""
    first = next(chunks, b"")
    if not first.startswith(_UTF_16):
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    yield decoder.decode(first).encode("utf-8", "replace")
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", "replace")


def _split(chunks: Iterable[bytes], reading: Reading) -> Iterator[tuple[int, bytes]]:
    """(number, beginning of the text) of all that ends in a line feed or a carriage return."""
    held = b""
    number = 1
    for chunk in chunks:
        for at, piece in enumerate(chunk.split(b"\n")):
            if at:
                if held:
                    yield number, held
                held = b""
                reading.num_lines = number
                number += 1
            for redrawn, part in enumerate(piece.split(b"\r")):
                if redrawn:
                    if held:
                        yield number, held
                    held = b""
                if len(held) < LINE_BYTES <= len(held) + len(part):
                    reading.num_clipped += 1
                held = (held + part)[:LINE_BYTES]
    if held:
        reading.num_lines = number
        yield number, held
