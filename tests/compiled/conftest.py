"""Tests of code for GPUs, compiled where there is none. They need a process that was started
without TRITON_INTERPRET; tests/cpu/test_compiled.py runs them in one."""
