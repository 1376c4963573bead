"""What routers hear of the cache: numbered changes, and snapshots for those that missed one."""

import sys
from array import array
from collections.abc import Sequence

from services.scheduler.kv_hashes import KvDelta
from shared.messages.cluster import KvEvents, KvSnapshot


class KvFeed:
    """Numbers the messages from 1 in each epoch, without gaps."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._epoch = 0
        self._number = 0

    def changes(self, epoch: int, delta: KvDelta) -> KvEvents | None:
        """The next message, None when nothing has changed."""
        if not (delta.stored or delta.removed or delta.cleared):
            return None
        return KvEvents(
            replica_id=self._replica_id,
            epoch=epoch,
            first=self._next_number(epoch),
            stored=_pack_uint64(delta.stored),
            removed=_pack_uint64(delta.removed),
            cleared=delta.cleared,
        )

    def cleared(self, epoch: int) -> KvEvents:
        """The cache is gone with its worker, or starts empty with a new one."""
        number = self._next_number(epoch)
        return KvEvents(replica_id=self._replica_id, epoch=epoch, first=number, cleared=True)

    def snapshot(self, epoch: int, hashes: Sequence[int]) -> KvSnapshot:
        """`hashes` are all that is stored, as of the last message."""
        return KvSnapshot(replica_id=self._replica_id, epoch=epoch, number=self._number, stored=_pack_uint64(hashes))

    def _next_number(self, epoch: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._number = epoch, 0
        self._number += 1
        return self._number


def _pack_uint64(values: Sequence[int]) -> bytes:
    numbers = array("Q", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
