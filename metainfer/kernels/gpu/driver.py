"""The few functions of NVIDIA's driver that load and start a function."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from metainfer.core.errors import MetainferError

PARAMETER_BYTES = 8
"""Room of each number that a function is given."""

_LIBRARY = "libcuda.so.1"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_WITHOUT_ASKING = 48 * 1024
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6  # CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
_LOG_BYTES = 8192
# A library that others share: types are given by value at each call, never set on its functions.
_pointer = ctypes.c_void_p


class Driver:
    """NVIDIA's driver; every call raises MetainferError with the driver's word for what failed."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise MetainferError(f"NVIDIA's driver cannot be loaded: {error}") from error
        self._check("cuInit", self._cuda.cuInit(0))
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def enter(self, device: int) -> None:
        """Make torch's context of the device numbered `device` current in this thread, if none is:
        a thread begins without one."""
        current = _pointer()
        self._check("cuCtxGetCurrent", self._cuda.cuCtxGetCurrent(ctypes.byref(current)))
        if current.value is not None:
            return
        if device not in self._contexts:
            context, handle = _pointer(), ctypes.c_int()
            self._check("cuDeviceGet", self._cuda.cuDeviceGet(ctypes.byref(handle), device))
            self._check(
                "cuDevicePrimaryCtxRetain",
                self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle),
            )
            self._contexts[device] = context
        self._check("cuCtxSetCurrent", self._cuda.cuCtxSetCurrent(self._contexts[device]))

    def load(self, code: str | bytes, name: str) -> int:
        """The function `name` of PTX text, which is translated for the current device, or of
        machine code; kept for good."""
        module, function = _pointer(), _pointer()
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
        values = (_pointer * 2)(ctypes.cast(log, _pointer), _pointer(_LOG_BYTES))
        image = code.encode() + b"\0" if isinstance(code, str) else code
        result = self._cuda.cuModuleLoadDataEx(ctypes.byref(module), image, 2, options, values)
        said = log.value.decode(errors="replace").strip()
        about = f" for {name}: {said}" if said else f" for {name}"
        self._check("cuModuleLoadDataEx", result, about)
        self._check(
            "cuModuleGetFunction",
            self._cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
            f" for {name}",
        )
        return function.value or 0

    def allow_shared(self, function: int, shared_bytes: int) -> None:
        """Let a block of `function` have `shared_bytes` of shared memory."""
        if shared_bytes > _SHARED_WITHOUT_ASKING:
            code = self._cuda.cuFuncSetAttribute(
                _pointer(function), _MAX_DYNAMIC_SHARED, shared_bytes
            )
            self._check("cuFuncSetAttribute", code, f" for {shared_bytes} bytes of shared memory")

    def launch(
        self,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared_bytes: int,
        stream: int,
        values: bytes,
    ) -> None:
        """Start `function` on `stream`; the driver copies the C numbers in `values`, one in each
        `PARAMETER_BYTES`, at once."""
        at = ctypes.cast(ctypes.c_char_p(values), _pointer).value or 0
        count = len(values) // PARAMETER_BYTES
        places = (_pointer * count)(*range(at, at + len(values), PARAMETER_BYTES))
        code = self._cuda.cuLaunchKernel(
            _pointer(function), *grid, threads, 1, 1, shared_bytes, _pointer(stream), places, None
        )
        self._check("cuLaunchKernel", code, f" of {threads} threads over {tuple(grid)} blocks")

    def _check(self, call: str, code: int, about: str = "") -> None:
        if code:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            word = name.value.decode() if name.value else f"error {code}"
            raise MetainferError(f"{call} failed with {word}{about}")
