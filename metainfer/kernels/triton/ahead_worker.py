"""A process that compiles: units come in as lines, and what became of each goes out as a line.

Started by `kernels.triton.ahead`, with the capability and the kind of code as its arguments; ends
when its stdin does.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys


def main() -> None:
    # Replies go to the real stdout; whatever compilers print goes nowhere.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    from metainfer.kernels.gpu.code_cache import PTX, code_of
    from metainfer.kernels.gpu.program import CudaUnit
    from metainfer.kernels.triton.stand_ins import compile_as_jit, use_stand_in_driver

    capability, kind = (int(sys.argv[1]), int(sys.argv[2])), sys.argv[3]
    use_stand_in_driver(capability)
    for line in sys.stdin:
        unit = pickle.loads(base64.b64decode(line))
        try:
            if isinstance(unit, CudaUnit):
                code_of(unit, capability, kind)
                said = "kept"
            elif kind == PTX:
                said = f"kept {unit.compile(capability).hash}"
            else:
                said = f"kept {compile_as_jit(unit).hash}"
        except Exception as error:  # whoever starts it meets it again, and says so
            said = f"failed {type(error).__name__}"
        replies.write(said + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
