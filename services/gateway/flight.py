"""One Submit under way: which choice of which request it computes, and which replica has it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.messages.generation import Emission


@dataclass(slots=True, eq=False)
class Flight:
    """Lives from its first submission until the choice has finished or nobody wants it any more.

    deliver      takes an emission for this choice
    replica_id   who has it; None while nobody has accepted it
    left         replicas it was taken away from: what they still send is not wanted
    heard_s      when the last emission came, or the flight began
    num_moves    how often it had to look for another replica
    num_worker_deaths  at how many deaths of a worker it was under way, as far as replicas have told
    is_landed    over for this side: whoever still accepts it is told to abort
    """

    request_id: str
    choice: int
    deliver: Callable[[int, Emission], None]
    heard_s: float
    replica_id: str | None = None
    left: set[str] = field(default_factory=set)
    is_landed: bool = False
    num_moves: int = 0
    num_worker_deaths: int = 0

    def belongs_to(self, replica_id: str) -> bool:
        """Whether an emission of that replica is for us. The first replica to be heard has the flight.

        Frames and the answer to a Submit travel on different subjects: a frame may come first.
        """
        if self.replica_id is None and replica_id not in self.left:
            self.replica_id = replica_id
        return self.replica_id == replica_id

    def leave_replica(self) -> None:
        """Its replica has gone silent: look for another, and do not listen to what this one sends late."""
        assert self.replica_id is not None
        self.left.add(self.replica_id)
        self.replica_id = None

    def forget_replica(self, num_worker_deaths: int) -> None:
        """Its replica does not know it, or no longer: any replica may have it next, this one too."""
        self.replica_id = None
        # One that has never heard of it knows of no deaths either.
        self.num_worker_deaths = max(self.num_worker_deaths, num_worker_deaths)

    def accept(self, replica_id: str) -> bool:
        """A replica has answered Accepted; False when another one has the flight already."""
        if self.replica_id is None:
            self.left.discard(replica_id)
            self.replica_id = replica_id
        return self.replica_id == replica_id
