"""The machine a benchmark ran on: every figure is printed beside it."""

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """One line: processor, cores that this process may use, Python."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"machine   {name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
