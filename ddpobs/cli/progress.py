"""A progress bar on stderr for work that takes long; nothing where stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """Show a bar until the block ends.

    Args:
        title: Text beside the bar.
        total: Amount of work; None if it is not known.

    Yields:
        A function that reports further work as done.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)
