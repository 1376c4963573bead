"""Who has been heard of lately. Silence is what a crash looks like from afar."""


class Presence:
    """When each of a set of peers was last heard of, in milliseconds of one clock."""

    def __init__(self, silence_ms: int) -> None:
        self._silence_ms = silence_ms
        self._last_heard_ms: dict[str, int] = {}

    def heard(self, name: str, now_ms: int) -> None:
        self._last_heard_ms[name] = now_ms

    def heard_all(self, now_ms: int) -> None:
        """Nobody could be heard for a while: give all of them time again."""
        for name in self._last_heard_ms:
            self._last_heard_ms[name] = now_ms

    def forget(self, name: str) -> None:
        self._last_heard_ms.pop(name, None)

    def take_silent(self, now_ms: int) -> list[str]:
        """Forget and return those that have been silent too long."""
        silent = [name for name, heard_ms in self._last_heard_ms.items() if now_ms - heard_ms > self._silence_ms]
        for name in silent:
            del self._last_heard_ms[name]
        return silent
