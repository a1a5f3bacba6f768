"""Runs a supervisor until a signal asks for its end: the body of `plexrl up` and of LocalCluster's process."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

from plexrl_controller.embedded.process import EmbeddedError
from plexrl_controller.embedded.settings import ClusterSettings
from plexrl_controller.embedded.supervisor import Supervisor


def run(settings: ClusterSettings, say: Callable[[str], None], on_ready: Callable[[str], None]) -> int:
    """Blocks until SIGINT, SIGTERM or SIGHUP, then stops everything. Returns the exit code; `say` tells why it is 1."""
    stop = threading.Event()

    def ask(_signum: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {signum: signal.signal(signum, ask) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        Supervisor(settings, say, stop).run(on_ready)
    except EmbeddedError as error:
        say(str(error))
        return 1
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return 0
