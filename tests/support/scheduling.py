"""A scheduler core with the checked worker at hand, step by step and without a world around it."""

from collections.abc import Iterable, Sequence

from services.scheduler import events as ev
from services.scheduler.core import SchedulerCore
from services.scheduler.planner import Limits
from services.scheduler.settings import Settings
from shared.messages.execution import Lease, Step, StepResult
from shared.messages.generation import Emission, Submit
from shared.messages.packing import pack_int32, unpack_int32
from tests.support.checked_worker import CheckedWorker


def submit(request_id: str, prompt: Iterable[int], max_new_tokens: int = 4, **fields: object) -> ev.Submitted:
    return ev.Submitted(
        Submit(
            request_id=request_id,
            gateway_id="g",
            prompt=pack_int32(prompt),
            max_new_tokens=max_new_tokens,
            **fields,  # type: ignore[arg-type]
        ),
        reply_to=f"reply {request_id}",
    )


class Bench:
    """Feed events, look at steps, let the worker answer them when the test says so."""

    def __init__(self, num_slots: int = 1000, window: int = 2, context_len: int = 500, **limits: int) -> None:
        settings = Settings(replica_id="r", limits=Limits(**limits), window=window, min_step_deadline_ms=1000)
        self.core = SchedulerCore(settings)
        self.worker = CheckedWorker(num_slots)
        self.now_ms = 0
        self.steps: list[Step] = []
        """Sent and not yet answered, oldest first."""
        self.effects: list[ev.Effect] = []
        """Of the last call."""
        self.output: dict[str, list[int]] = {}
        self.last: dict[str, Emission] = {}
        lease = Lease(
            group="w", epoch=1, num_slots=num_slots, context_len=context_len, vocab_size=1000, end_token_ids=(0,)
        )
        self.feed(ev.WorkerJoined(lease))

    def feed(self, *events: ev.Event) -> list[ev.Effect]:
        self.effects = self.core.step(self.now_ms, events)
        for effect in self.effects:
            match effect:
                case ev.SendStep(step=step):
                    self.steps.append(step)
                case ev.SendFrame(frame=frame):
                    for emission in frame.emissions:
                        self.output.setdefault(emission.request_id, []).extend(unpack_int32(emission.token_ids))
                        self.last[emission.request_id] = emission
        for request in self.core.requests.values():
            request.check_invariants()
        return self.effects

    def answer(self) -> StepResult:
        """The worker runs the oldest step, the core takes the result."""
        result = self.worker.execute(self.steps.pop(0))
        self.feed(ev.StepDone(result))
        return result

    def run(self) -> None:
        """Until nothing is under way."""
        while self.steps:
            self.answer()

    def of(self, kind: type) -> Sequence[object]:
        """The effects of the last call that are of one kind."""
        return [effect for effect in self.effects if isinstance(effect, kind)]


def extend_lens(step: Step) -> list[int]:
    return unpack_int32(step.extend)[1::2]


def decode_rows(step: Step) -> list[int]:
    return unpack_int32(step.decode)
