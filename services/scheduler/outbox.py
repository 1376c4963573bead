"""Effects of one turn of the core, in order; tokens of one gateway's requests are gathered into one Frame."""

from collections import defaultdict

from services.scheduler.events import Effect, SendFrame
from shared.messages.generation import Emission, Frame


class Outbox:
    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._effects: list[Effect] = []
        self._emissions: defaultdict[str, list[Emission]] = defaultdict(list)

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    def emit(self, gateway_id: str, emission: Emission) -> None:
        self._emissions[gateway_id].append(emission)

    def take(self, epoch: int, seq: int) -> list[Effect]:
        """Everything gathered since the last call; `epoch` and `seq` name the step whose result the frames follow."""
        frames = [
            SendFrame(
                gateway_id,
                Frame(replica_id=self._replica_id, epoch=epoch, seq=seq, emissions=tuple(emissions)),
            )
            for gateway_id, emissions in self._emissions.items()
        ]
        self._emissions.clear()
        effects, self._effects = self._effects, []
        return effects + frames
