"""What the core is told once: the configuration without strings, files or defaults of the command line."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.planner import Limits
from services.scheduler.radix_tree import RadixTree
from services.scheduler.waiting import OrderKey, longest_prefix_match


@dataclass(frozen=True, slots=True)
class Settings:
    replica_id: str
    limits: Limits = field(default_factory=Limits)
    order_key: OrderKey = field(default_factory=lambda: longest_prefix_match(aging_ms=2000))
    new_tree: Callable[[], RadixTree] = RadixTree
    window: int = 2
    """Steps that may be unanswered; 1 turns pipelining off."""
    max_waiting_reqs: int = 4096
    min_step_deadline_ms: int = 5000
    max_worker_deaths: int = 2
    """A request that was under way at so many worker deaths is taken to be their cause."""
    worker_wait_ms: int = 2000
    """Without a worker for so long, requests are handed back: another replica may have one."""
    load_interval_ms: int = 100
