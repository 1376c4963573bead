"""CPU kernels, compiled by Numba at first use and cached on disk; no compiler is needed on the machine.

A kernel is a C function over one array of int64 arguments (addresses, sizes), run by all of torch's own OpenMP threads at
once: a second pool of threads would spin against the first. Its threads claim items of work from a shared counter, and what an
item computes does not depend on who computes it.
"""

import hashlib
import os
from pathlib import Path

from numba import config


def _use_cache_of_user() -> None:
    """Keep compiled kernels in the user's cache directory, one folder per version of these sources.

    Numba itself looks at the file that defines a kernel only: a change in a helper of another file would go unseen.
    """
    if config.CACHE_DIR:  # NUMBA_CACHE_DIR: the user's own choice
        return
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    config.CACHE_DIR = str(root / "radixmesh" / "kernels" / digest)


_use_cache_of_user()
