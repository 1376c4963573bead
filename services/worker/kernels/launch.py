"""Run a kernel on torch's OpenMP threads."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_DIRECT = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)  # keeps the GIL: such calls take microseconds
_RELEASING = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_gomp_parallel() -> Any:
    """`GOMP_parallel(function, data, num_threads, flags)` of the OpenMP library that torch itself runs on, None without one."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel  # the loader looks through the library's own dependencies
    except (OSError, AttributeError):
        return None
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return function


class Kernel:
    """A compiled kernel and the shape of its arguments.

    The first `num_counters` arguments are counters, zero at the start; threads claim items through them.
    """

    _gomp_parallel = _find_gomp_parallel()
    _helpers: ThreadPoolExecutor | None = None

    def __init__(self, compiled: Any, num_counters: int, num_arguments: int) -> None:
        self._compiled = compiled  # keeps the machine code alive
        self._address: int = compiled.address
        self._direct = _DIRECT(self._address)
        self._releasing = _RELEASING(self._address)
        self._zeros = (0,) * num_counters
        self._arguments = ctypes.c_int64 * (num_counters + num_arguments)

    def run_here(self, *arguments: int) -> None:
        """On this thread, which keeps the GIL: for work of microseconds, less than handing the GIL around may cost."""
        values = self._arguments(*self._zeros, *arguments)
        self._direct(ctypes.addressof(values))

    def run(self, num_threads: int, *arguments: int) -> None:
        """On `num_threads` threads at once, without the GIL; returns when all are through."""
        values = self._arguments(*self._zeros, *arguments)
        if num_threads == 1:
            self._releasing(ctypes.addressof(values))
        elif self._gomp_parallel is not None:
            self._gomp_parallel(self._address, ctypes.addressof(values), num_threads, 0)
        else:
            self._run_on_helpers(num_threads, ctypes.addressof(values))

    def _run_on_helpers(self, num_threads: int, values: int) -> None:
        """Where torch runs on another OpenMP: threads of our own."""
        if Kernel._helpers is None:
            Kernel._helpers = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="kernel")
        others = [Kernel._helpers.submit(self._releasing, values) for _ in range(num_threads - 1)]
        self._releasing(values)
        for other in others:
            other.result()
