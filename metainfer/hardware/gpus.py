"""The GPUs, as NVIDIA's driver lists them."""

from __future__ import annotations

import csv
import shutil
import subprocess

from metainfer.hardware.machine import Gpu, Unknown

_QUERY = "name,compute_cap,memory.total,memory.free,driver_version"
_TIMEOUT_S = 20.0


def read_gpus() -> tuple[tuple[Gpu, ...] | Unknown, str | Unknown]:
    """(GPUs, version of the driver)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        why = Unknown("nvidia-smi, which comes with the driver, is not installed")
        return why, why
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = Unknown(f"nvidia-smi does not run: {error}")
        return why, why
    if done.returncode != 0:
        said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[0]
        why = Unknown(f"nvidia-smi ended with code {done.returncode} and said: {said}")
        return why, why
    return parse_listing(done.stdout)


def parse_listing(text: str) -> tuple[tuple[Gpu, ...] | Unknown, str | Unknown]:
    """(GPUs, version of the driver) from the lines that nvidia-smi prints, sizes in MiB."""
    gpus = []
    driver: str | Unknown = Unknown("the driver lists no GPU")
    for cells in csv.reader(text.strip().splitlines(), skipinitialspace=True):
        try:
            name, capability, total, free, driver = cells
            major, minor = map(int, capability.split("."))
            gpus.append(Gpu(name, (major, minor), int(total) * 2**20, int(free) * 2**20))
        except ValueError:
            # Such as "[N/A]" for the memory of a device that shares the host's.
            return Unknown(f"nvidia-smi's line is not understood: {', '.join(cells)}"), driver
    return tuple(gpus), driver
