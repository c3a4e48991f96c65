"""Wires: in which form numbers that ranks sum travel; `comm.wire` makes them."""

from __future__ import annotations

PLAIN = "plain"
WIRES = (PLAIN, "fp8", "int8")
"""Plain: as they are computed."""

BLOCK = 128
"""Numbers of one row that share a scale in 8 bits."""
