"""What a user sees while a model is fetched and converted: bars on a terminal, elsewhere one line a phase."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

Report = Callable[[int], None]
"""Called with the number of bytes done so far."""


class Display:
    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def downloading(self, what: str, total_bytes: int) -> Iterator[Report]:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
        with self._phase(f"Fetching {what}", *columns, total=total_bytes) as report:
            yield report
            report(total_bytes)

    @contextmanager
    def converting(self, what: str) -> Iterator[None]:
        with self._phase(f"Converting {what} (once)", SpinnerColumn(), TimeElapsedColumn(), total=None):
            yield

    @contextmanager
    def _phase(self, title: str, *columns: ProgressColumn, total: int | None) -> Iterator[Report]:
        if not self._console.is_terminal:
            self.note(title)
        with Progress(
            TextColumn("{task.description}"), *columns, console=self._console, disable=not self._console.is_terminal
        ) as progress:
            task = progress.add_task(title, total=total)
            yield lambda done: progress.update(task, completed=done)
