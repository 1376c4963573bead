"""One edge of the radix tree."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.scheduler.extents import Extents
from shared.messages.packing import INT32_BYTES

TokenIds = npt.NDArray[np.int32]
TOKEN_DTYPE = np.dtype("<i4")


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of tokens whose keys and values lie in the cache: one edge of the prefix tree.

    namespace    whose prefix this is; the root it hangs under
    packed       int32 [n], little-endian  token ids on the edge from the parent, empty at a root; bytes, because
                 comparing bytes is one memcmp where comparing arrays allocates
    extents      runs of slots that hold them, in order: sum of their lengths == n
    end          tokens from the root to the end of this node, its own included
    order        rises with each insertion; the parts of a split node share it
    last_step    scheduler step of the last match or insertion, not seconds: eviction order must replay
    num_matches  how often it was matched or inserted again
    lock_ref     running requests whose prefix ends at this node or below it
    hashes       uint64 names of the blocks (see shared.kv_hashes) whose last token is in this node, in order
    queued       the eviction queue has an entry for it
    """

    namespace: str
    packed: bytes
    extents: Extents
    parent: "RadixNode | None"
    end: int
    order: int
    last_step: int
    num_matches: int = 0
    lock_ref: int = 0
    hashes: list[int] = field(default_factory=list)
    children: "dict[int, RadixNode]" = field(default_factory=dict)  # by first token
    queued: bool = False

    def __len__(self) -> int:
        return len(self.packed) // INT32_BYTES

    @property
    def tokens(self) -> TokenIds:
        """int32 [n], read-only view"""
        return np.frombuffer(self.packed, TOKEN_DTYPE)

    @property
    def first_token(self) -> int:
        return int.from_bytes(self.packed[:INT32_BYTES], "little", signed=True)

    @property
    def start(self) -> int:
        """Tokens from the root to the beginning of this node."""
        return self.end - len(self)

    @property
    def is_evictable_leaf(self) -> bool:
        return self.lock_ref == 0 and not self.children and self.parent is not None


def common_prefix_len(a: TokenIds, b: TokenIds) -> int:
    """How many tokens `a` and `b` have in common before they differ or one of them ends."""
    num = min(len(a), len(b))
    differs = a[:num] != b[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num
