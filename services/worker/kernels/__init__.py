"""CPU kernels, compiled by Numba at first use and cached on disk; no compiler is needed on the machine.

A kernel is a C function over one array of int64 arguments (addresses, sizes), run by all of torch's own OpenMP threads at
once: a second pool of threads would spin against the first. Its threads claim items of work from a shared counter, and what an
item computes does not depend on who computes it.
"""

import hashlib
import os
import tempfile
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
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "radixmesh" / "kernels" / digest
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # a read-only file system, or a user without a home
        writable = False
    # Code is loaded from here: never a folder that others could have made.
    config.CACHE_DIR = str(folder) if writable else tempfile.mkdtemp(prefix="radixmesh-kernels-")


_use_cache_of_user()
