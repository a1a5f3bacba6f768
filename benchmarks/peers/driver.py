"""Drives one peer in a process of its own: whatever it does, its parent can end it.

    python -m benchmarks.peers.driver ray 5

Reads orders {"in_flight", "seconds"} from standard input and answers on the file descriptor given, one JSON object a
line: {} once the peer is open, then what each order showed, or {"error"}, which is the last.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.driving import drive
from benchmarks.peers import bare_pipeline, procrastinate_postgres, queues, ray_actor
from benchmarks.peers.peer import Peer

PEERS: Mapping[str, Callable[[], Peer]] = {
    "ray": ray_actor.peer,
    "celery": queues.celery,
    "dramatiq": queues.dramatiq,
    "procrastinate": procrastinate_postgres.peer,
    "bare": bare_pipeline.peer,
}


async def serve(peer: Peer, answer: Callable[[Mapping[str, Any]], None]) -> None:
    """Opens the peer and drives it as told, until standard input ends."""
    async with peer.open() as call:
        answer({})
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            answer(asdict(await drive(call, order["in_flight"], order["seconds"])))


def main() -> int:
    """Returns the exit status."""
    name, descriptor = sys.argv[1], int(sys.argv[2])
    with os.fdopen(descriptor, "w", buffering=1) as answers:

        def answer(content: Mapping[str, Any]) -> None:
            answers.write(json.dumps(content) + "\n")

        try:
            asyncio.run(serve(PEERS[name](), answer))
        except Exception as error:  # noqa: BLE001 - a peer may fail as it likes: its parent reports it
            answer({"error": f"{type(error).__name__}: {error}"})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
