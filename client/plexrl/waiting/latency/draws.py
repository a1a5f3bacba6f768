"""Latencies drawn by what they are of, not by the order in which they are asked for.

Each draw has its own stream of chance, made from the seed, the episode, the stage and the object's name. So a history
does not change when another object comes in between, or when a machine is faster.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from plexrl.waiting.latency.presets import MaybeLaw

OVERRIDE_PREFIX = "latency.plexrl.dev/"
NEVER = "never"


class Draws:
    """Chance for one cluster in one episode."""

    def __init__(self, seed: int, episode: int = 0) -> None:
        self._seed = seed
        self._episode = episode

    def latency_s(self, law: MaybeLaw, stage: str, *names: object) -> float:
        """How long a stage takes for the object of these names; inf if it never ends."""
        if law is None:
            return 0.0
        return law.at(self._episode).sample(self._generator(stage, *names))

    def _generator(self, *names: object) -> np.random.Generator:
        text = "/".join(str(name) for name in (self._seed, self._episode, *names))
        return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])))


def override_s(annotations: Mapping[str, str], stage: str) -> float | None:
    """The latency that an object asks for itself, e.g. latency.plexrl.dev/start: "12.5" or "never".

    Anything else counts as not said: an annotation must not stop a cluster.
    """
    text = annotations.get(OVERRIDE_PREFIX + stage)
    if text is None:
        return None
    if text == NEVER:
        return math.inf
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
