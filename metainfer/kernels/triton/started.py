"""Starts that were made before: what is started again as it was needs nothing of Triton's run time
but the launcher of the compiled kernel.

Triton finds the code of a launch by binding its arguments to names, asking each for its type, and
making text of all options: 9 us (on a host without a GPU), 118 times in a prefill step of four
layers, longer than many of these kernels run. Here a key is made of what the arguments are, which
takes 2 us; it is finer than Triton's, so equal keys mean equal code. Whatever is not exactly as
known goes Triton's way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime import JITFunction, driver

_FIRST, _LAST = (3, 6), (3, 9)
"""Versions of Triton whose compiled kernels are known to be started as `Starts.again` does."""

Key = tuple[Any, ...]


def key_of(kernel: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Key | None:
    """Equal for launches that run the same code on one GPU; None for arguments that are not known
    here. Of numbers it holds whether they are 1, whether 16 divides them, and how wide they are, of
    tensors their type and whether 16 divides their address, of constants and options their values.

    Args:
        arguments: none for a parameter that is a constant (`takes_values`).
        named: constants, and the compiler's options.
    """
    parts: list[Any] = [id(kernel)]
    add = parts.append
    for value in arguments:
        kind = type(value)
        if kind is torch.Tensor:
            add(value.dtype)
            add(value.data_ptr() % 16 == 0)
        elif kind is int:
            if -0x8000_0000 <= value < 0x8000_0000:
                add(1 if value == 1 else 2 if value % 16 == 0 else 3)
            else:
                add((value % 16 == 0, value < 2**63))
        elif value is None or kind is float or kind is bool:
            add(kind)
        else:
            return None
    return (*parts, *named, *named.values())


def takes_values(kernel: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether `arguments` are all that the code takes when it runs, and `named` none of it."""
    values = [not parameter.is_constexpr for parameter in kernel.params]
    constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    alone = all(name in constant or name not in kernel.arg_names for name in named)
    return alone and values == [True] * len(arguments) + [False] * (len(values) - len(arguments))


@dataclass(frozen=True, slots=True)
class Started:
    """A start that was made.

    Attributes:
        kept: the kernel, whose id is in the key, and its code; neither goes while it is listed.
        run: the launcher of the code.
        function, metadata: as that takes them.
        constants: what it takes behind the arguments.
    """

    kept: tuple[Any, Any]
    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class Starts:
    """By device and key. Triton's options are not looked at again, hooks on launches (profilers)
    are."""

    def __init__(self) -> None:
        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        self._is_known = _FIRST <= version <= _LAST
        self._made: dict[tuple[int, Key], Started] = {}

    def again(self, key: Key, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> bool:
        """Start what was started with an equal key; False: nothing was, and Triton is to do it."""
        if not self._made:
            return False
        gpu = driver.active
        device = gpu.get_current_device()
        made = self._made.get((device, key))
        if made is None or _is_watched():
            return False
        made.run(
            *(grid if len(grid) == 3 else (*grid, 1, 1)[:3]),
            gpu.get_current_stream(device),
            made.function,
            made.metadata,
            None,  # for hooks, of which there are none
            None,
            None,
            *arguments,
            *made.constants,
        )
        return True

    def keep(
        self,
        key: Key,
        kernel: Any,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        compiled: Any,
    ) -> None:
        """Remember what Triton started."""
        if (
            self._is_known
            and isinstance(kernel, JITFunction)
            and not kernel.pre_run_hooks
            and takes_values(kernel, arguments, named)
            and all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
        ):
            constants = tuple(
                named.get(parameter.name, parameter.default)
                for parameter in kernel.params
                if parameter.is_constexpr
            )
            self._made[driver.active.get_current_device(), key] = Started(
                (kernel, compiled),
                compiled.run,
                compiled.function,
                compiled.packed_metadata,
                constants,
            )


def _is_watched() -> bool:
    """Whether something wants to be called at each launch."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
