"""Answers by the content of the question: bounded in number and bytes, the longest unused go first."""

from collections import OrderedDict
from hashlib import blake2b


class AnswerCache:
    """Packed replies by a hash of the packed request. An answer may hold for a while only."""

    def __init__(self, max_answers: int, max_bytes: int) -> None:
        assert max_answers > 0
        assert max_bytes > 0
        self.max_answers = max_answers
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._answers: OrderedDict[bytes, tuple[bytes, int | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    @staticmethod
    def key(request: bytes) -> bytes:
        return blake2b(request, digest_size=24).digest()

    def get(self, key: bytes, now_ms: int) -> bytes | None:
        found = self._answers.get(key)
        if found is None:
            return None
        answer, until_ms = found
        if until_ms is not None and now_ms >= until_ms:
            self._drop(key)
            return None
        self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: bytes, until_ms: int | None = None) -> None:
        """Remember an answer, for good or until `until_ms`. One larger than the whole cache is not kept."""
        if key in self._answers:
            self._drop(key)
        if len(answer) > self.max_bytes:
            return
        self._answers[key] = (answer, until_ms)
        self.num_bytes += len(answer)
        while len(self._answers) > self.max_answers or self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._answers)))
        assert self._answers or self.num_bytes == 0

    def _drop(self, key: bytes) -> None:
        answer, _ = self._answers.pop(key)
        self.num_bytes -= len(answer)
