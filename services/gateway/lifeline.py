"""What can end a request from outside while it waits: its client, its deadline, its owner, a full buffer.

All of them interrupt the request's task with an exception that says why, whatever it waits for at that moment.
"""

import asyncio
from types import TracebackType

from starlette.types import Receive

from services.gateway.errors import ApiError


class ClientGone(Exception):
    """The client has closed the connection: there is nobody to answer."""


class Lifeline:
    """`async with Lifeline(receive) as lifeline:` runs a block that `cut` ends with an error.

    While it is entered it reads from `receive`, so the body must have been read before. The last bytes of the answer are
    sent outside: the server reports a finished answer as a disconnect too.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._error: BaseException | None = None
        self._is_over = False

    async def __aenter__(self) -> "Lifeline":
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer: asyncio.TimerHandle | None = None
        self._watcher = asyncio.create_task(self._watch(), name="watch client")
        return self

    @property
    def reason(self) -> str:
        """Why the block ends, in a word for the other services: "error" unless it was cut."""
        if isinstance(self._error, ApiError):
            return self._error.body.error.code or "error"
        return "client" if isinstance(self._error, ClientGone) else "error"

    def cut(self, error: BaseException) -> None:
        """End the block with `error`. The first cut counts; after the end it does nothing."""
        if self._error is None and not self._is_over:
            self._error = error
            self._task.cancel()

    def cut_at(self, when_s: float, error: Exception) -> None:
        """Cut at a time of the event loop; replaces the time set before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when_s, self.cut, error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._error is not None:
            self._task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                raise self._error from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.cut(ClientGone())
