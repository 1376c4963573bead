"""How much one API key may ask for in a minute. Pure: time comes with the calls."""

from dataclasses import dataclass

from services.gateway.errors import ApiError, rate_limited

MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """Fills up to `capacity` within a minute. It may go below zero: what a request costs is known when it is over."""

    capacity: int
    level: float
    filled_s: float

    def fill(self, now_s: float) -> None:
        self.level = min(self.capacity, self.level + (now_s - self.filled_s) * self.capacity / MINUTE_S)
        self.filled_s = now_s

    def wait_s(self, wanted: float) -> float:
        """Seconds until the level is at `wanted`."""
        return max(0.0, (wanted - self.level) * MINUTE_S / self.capacity)


class Quotas:
    """A limit of 0 is no limit. Only configured keys (and "" for none) appear, so the number of buckets is bounded."""

    def __init__(self, max_requests_per_minute: int, max_tokens_per_minute: int) -> None:
        self._max_requests = max_requests_per_minute
        self._max_tokens = max_tokens_per_minute
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}

    def admit(self, key: str, now_s: float) -> ApiError | None:
        """Charge one request, or say why not."""
        if self._max_tokens:
            tokens = self._bucket(self._tokens, key, self._max_tokens, now_s)
            if tokens.level < 1:
                message = f"this key has used up its {self._max_tokens} tokens per minute"
                return rate_limited(message, tokens.wait_s(1))
        if self._max_requests:
            requests = self._bucket(self._requests, key, self._max_requests, now_s)
            if requests.level < 1:
                message = f"this key has used up its {self._max_requests} requests per minute"
                return rate_limited(message, requests.wait_s(1))
            requests.level -= 1
        return None

    def charge(self, key: str, num_tokens: int, now_s: float) -> None:
        """A request has cost so many prompt and generated tokens."""
        if self._max_tokens:
            self._bucket(self._tokens, key, self._max_tokens, now_s).level -= num_tokens

    @staticmethod
    def _bucket(buckets: dict[str, _Bucket], key: str, capacity: int, now_s: float) -> _Bucket:
        bucket = buckets.setdefault(key, _Bucket(capacity, capacity, now_s))
        bucket.fill(now_s)
        return bucket
