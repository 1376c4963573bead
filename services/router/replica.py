"""One replica as the router sees it: its last word, what was sent to it since, and what it has cached."""

from collections import deque
from dataclasses import dataclass, field

from services.router.config import RouterConfig
from services.router.kv_view import KvView
from shared.messages.cluster import Load


@dataclass(slots=True, eq=False)
class Replica:
    """A replica that has said something within `silence_s`.

    load        its last Load
    heard_ms    when that came
    bookings    (when, uncached prompt tokens) of requests sent there, by this router or a peer, that no Load shows yet
    asked_ms    when a snapshot was last asked for; None before the first time
    """

    load: Load
    heard_ms: int
    kv: KvView
    is_draining: bool = False
    bookings: deque[tuple[int, int]] = field(default_factory=deque)
    num_booked_tokens: int = 0
    asked_ms: int | None = None

    def take_load(self, load: Load, now_ms: int, settle_ms: int) -> None:
        """A newer word. What was booked `settle_ms` ago or earlier had reached the replica when it spoke, so it is in there."""
        self.load, self.heard_ms = load, now_ms
        self.kv.enter_epoch(load.epoch)
        while self.bookings and self.bookings[0][0] <= now_ms - settle_ms:
            self.num_booked_tokens -= self.bookings.popleft()[1]
        assert self.num_booked_tokens >= 0
        assert self.bookings or self.num_booked_tokens == 0

    def book(self, now_ms: int, num_tokens: int) -> None:
        self.bookings.append((now_ms, num_tokens))
        self.num_booked_tokens += num_tokens

    def is_available(self, now_ms: int, within_s: float) -> bool:
        """Takes new work, and has said so in the last `within_s` seconds."""
        return self.load.accepting and not self.is_draining and now_ms - self.heard_ms <= within_s * 1000

    def cost_s(self, num_uncached_tokens: int, config: RouterConfig) -> float:
        """Seconds until a request with so many tokens to prefill would produce its first token here, and a share for crowding."""
        num_prefill_tokens = num_uncached_tokens + self.load.num_uncached_tokens + self.num_booked_tokens
        num_reqs = self.load.num_running_reqs + self.load.num_waiting_reqs + len(self.bookings)
        return num_prefill_tokens / config.prefill_tokens_per_s + config.decode_weight_s * num_reqs
