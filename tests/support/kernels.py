"""The compiled and the plain kernels, for tests that run on each."""

from __future__ import annotations

import pytest

from logcore.kernels import kernel, plain

try:
    from logcore.kernels import _compiled as compiled
except ImportError:
    compiled = None

needs_compiler = pytest.mark.skipif(
    compiled is None, reason="no C compiler built the compiled kernels"
)
KERNELS = [plain] if compiled is None else [plain, compiled]
#: For tests of behavior that only logs on the compiled kernels have.
runs_compiled = pytest.mark.skipif(
    kernel.NAME != "compiled", reason="this run is on the plain kernels"
)
