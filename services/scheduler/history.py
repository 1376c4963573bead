"""The last requests that ended: a gateway may still miss their last tokens, or submit them a second time."""

from collections import OrderedDict
from dataclasses import dataclass

from shared.messages.generation import Emission
from shared.messages.packing import INT32_BYTES


@dataclass(frozen=True, slots=True)
class Ended:
    """`generated` are all token ids, int32; `last` is the emission that carried the finish."""

    generated: bytes
    last: Emission

    def from_position(self, position: int) -> Emission:
        last = self.last
        return Emission(
            request_id=last.request_id,
            position=position,
            token_ids=self.generated[position * INT32_BYTES :],
            finish=last.finish,
            cached_tokens=last.cached_tokens,
            stop_token=last.stop_token,
            error=last.error,
        )


class History:
    """A bounded memory of ended requests, oldest forgotten first."""

    def __init__(self, max_requests: int = 1024) -> None:
        self._max_requests = max_requests
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    def add(self, ended: Ended) -> None:
        self._ended[ended.last.request_id] = ended
        while len(self._ended) > self._max_requests:
            self._ended.popitem(last=False)

    def get(self, request_id: str) -> Ended | None:
        return self._ended.get(request_id)
