"""A session of one model that several rollouts use at the same time. Knows when it is needed, not what for."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from plexrl import errors
from plexrl.functions import BoundFunction
from plexrl.model import Model
from plexrl.results import Completions
from plexrl.session import Session

log = logging.getLogger("plexrl")

MAX_CONCURRENT = 64
"""Most calls that a session has with its engine at a time."""
_IDLE_LIMIT_S = 86_400.0
_AWAY_S = 5.0
_ENDED = ("CLOSED", "EXPIRED")


class SharedSession:
    """Opened by the first that has something to ask, closed when the last of its users is done.

    A model has eight open sessions at most: one for each rollout would be a limit on rollouts.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._users = 0
        self._session: Session | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Around whatever may ask for something. That it could not be closed is no error of who used it."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                left = None
                if not self._users:
                    left, self._session = self._session, None
            if left is not None:
                try:
                    left.close(retry_for_s=_AWAY_S)
                except errors.PlexRLError as error:
                    log.warning("session %s was not closed, it will expire: %s", left.session_id, error)

    @property
    def generate(self) -> BoundFunction[..., Completions]:
        """`session.generate` of the one that is open."""
        with self._lock:
            if self._session is None or self._session.state in _ENDED:
                # The hours in which the parts of a rollout are sampled elsewhere are no reason for it to expire.
                self._session = self._model.session(
                    max_concurrent=MAX_CONCURRENT, grace_s=0.0, idle_limit_s=_IDLE_LIMIT_S
                )
            return self._session.generate
