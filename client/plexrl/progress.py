"""Shows a bar while a blocking call takes long, on a terminal only.

Knows futures; knows nothing of what they compute. `PLEXRL_PROGRESS=0` turns it off.
"""

import os
import sys
from typing import TypeVar

from plexrl.futures import CallFuture

ResultT = TypeVar("ResultT")

QUIET_S = 2.0
REFRESH_S = 0.2


def enabled() -> bool:
    """Whether bars are shown: standard error is a terminal and PLEXRL_PROGRESS is not 0."""
    return sys.stderr.isatty() and os.environ.get("PLEXRL_PROGRESS", "1") != "0"


def wait(future: CallFuture[ResultT], title: str, *, quiet_s: float = QUIET_S) -> ResultT:
    """Waits for a future's result, with a bar after the first `quiet_s` seconds."""
    if not enabled():
        return future.result()
    try:
        return future.result(quiet_s)
    except TimeoutError:
        if future.done():
            return future.result()
    return _wait_with_bar(future, title)


def _wait_with_bar(future: CallFuture[ResultT], title: str) -> ResultT:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        while True:
            done, total = future.progress
            bar.update(task, description=f"{title} {future.state.lower()}", completed=done, total=total or None)
            try:
                return future.result(REFRESH_S)
            except TimeoutError:
                if future.done():
                    return future.result()
