"""The few functions of NVIDIA's driver by which processes reach each other's memory."""

from __future__ import annotations

import ctypes

from metainfer.core.errors import MetainferError

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_HANDLE_BYTES = 64
_WAIT_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_pointer = ctypes.c_void_p
_address = ctypes.c_uint64


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which calls take by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


class PeerDriver:
    """Calls are for the current context; each raises MetainferError with the driver's word for what
    failed."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise MetainferError(f"NVIDIA's driver cannot be loaded: {error}") from error
        self._check("cuInit", self._cuda.cuInit(0))

    def device_of(self, bus_id: str) -> int:
        """The number that this process has for a GPU. Raises where it is hidden from it."""
        number = ctypes.c_int()
        code = self._cuda.cuDeviceGetByPCIBusId(ctypes.byref(number), bus_id.encode())
        self._check("cuDeviceGetByPCIBusId", code, f" for {bus_id}")
        return number.value

    def allocate(self, size: int) -> int:
        """Device memory of its own, never part of a pool: its address. Freed with the process."""
        found = _address()
        code = self._cuda.cuMemAlloc_v2(ctypes.byref(found), ctypes.c_size_t(size))
        self._check("cuMemAlloc", code, f" for {size} bytes")
        return found.value

    def export(self, address: int) -> bytes:
        """What another process opens memory of `allocate` with."""
        handle = _Handle()
        code = self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), _address(address))
        self._check("cuIpcGetMemHandle", code)
        return bytes(handle.bytes)

    def open(self, exported: bytes) -> int:
        """Address at which this process reaches another's memory."""
        found = _address()
        handle = _Handle.from_buffer_copy(exported)
        code = self._cuda.cuIpcOpenMemHandle_v2(
            ctypes.byref(found), handle, ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        self._check("cuIpcOpenMemHandle", code)
        return found.value

    def register_host(self, address: int, size: int) -> None:
        """Pin memory of the host that lies at `address`, a multiple of a page."""
        code = self._cuda.cuMemHostRegister_v2(
            _pointer(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE)
        )
        self._check("cuMemHostRegister", code, f" for {size} bytes")

    def unregister_host(self, address: int) -> None:
        """What `register_host` pinned."""
        code = self._cuda.cuMemHostUnregister(_pointer(address))
        self._check("cuMemHostUnregister", code)

    def device_address(self, address: int) -> int:
        """Where the GPU finds registered memory of the host."""
        found = _address()
        code = self._cuda.cuMemHostGetDevicePointer_v2(
            ctypes.byref(found), _pointer(address), ctypes.c_uint(0)
        )
        self._check("cuMemHostGetDevicePointer", code)
        return found.value

    def queue_write(self, address: int, number: int, stream: int) -> None:
        """Queue the writing of 32 bits, behind which lies all that the stream did before."""
        code = self._cuda.cuStreamWriteValue32_v2(
            _pointer(stream), _address(address), ctypes.c_uint32(number), ctypes.c_uint(0)
        )
        self._check("cuStreamWriteValue32", code)

    def queue_wait(self, address: int, number: int, stream: int) -> None:
        """Queue a wait until 32 bits are `number`, or up to 2**31 beyond it."""
        code = self._cuda.cuStreamWaitValue32_v2(
            _pointer(stream), _address(address), ctypes.c_uint32(number), ctypes.c_uint(_WAIT_GEQ)
        )
        self._check("cuStreamWaitValue32", code)

    def free(self, address: int) -> None:
        """What `allocate` gave."""
        self._check("cuMemFree", self._cuda.cuMemFree_v2(_address(address)))

    def close(self, address: int) -> None:
        """What `open` gave."""
        self._check("cuIpcCloseMemHandle", self._cuda.cuIpcCloseMemHandle(_address(address)))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Queue a copy between any two places that this process reaches."""
        code = self._cuda.cuMemcpyAsync(
            _address(target), _address(source), ctypes.c_size_t(size), _pointer(stream)
        )
        self._check("cuMemcpyAsync", code, f" of {size} bytes")

    def _check(self, call: str, code: int, about: str = "") -> None:
        if code:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            word = name.value.decode() if name.value else f"error {code}"
            raise MetainferError(f"{call} failed with {word}{about}")
