"""A second client process of the fault matrix: jobs that come, sample, cancel and go, one after the other, for ever.

    python -m tests.support.fault_guest ENDPOINT TOKEN_FILE HISTORY PAUSE_S

What the first client never does: a call that runs for longer than a chunk and gives way, one that is cancelled while it
runs, a model that is deleted, a job that is finished. Each visit that ended is a line of the history.
"""

import json
import sys
import time
from pathlib import Path

import plexrl

WAIT_S = 600.0
LEASE_S = 600.0
LONG, ENDLESS = 8, 200
"""Completions of the call that gives way, and of the one that is cancelled."""
COMPLETION_S, LATE_COMPLETION_S = 0.05, 0.15
"""Of the first `LONG` completions, and of those that only the endless call has."""
JOB = "guest"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 24,
    "max_position_embeddings": 64,
    "plexrl_fake": [
        {
            "function": f"completion-{number}",
            "fault": "slow",
            "delay_s": COMPLETION_S if number < LONG else LATE_COMPLETION_S,
        }
        for number in range(ENDLESS)
    ],
}


def main(endpoint: str, token_file: str, history_file: str, pause_s: float) -> None:
    """Visits, and goes on where an earlier life of this process stopped."""
    path = Path(history_file)
    number = path.read_bytes().count(b"\n") if path.exists() else 0
    with (
        plexrl.connect(endpoint, token=Path(token_file).read_text().strip()) as cluster,
        open(history_file, "a", buffering=1) as history,
    ):
        while True:
            history.write(json.dumps({"visit": number, **visit(cluster, f"{JOB}-{number}")}) + "\n")
            number += 1
            time.sleep(pause_s)


def visit(cluster: plexrl.Cluster, name: str) -> dict[str, object]:
    """A job from its creation to its end; one that an earlier life began is ended."""
    try:
        job = cluster.attach(name)
    except plexrl.errors.NotFound:
        job = cluster.job(name, lease_s=LEASE_S)
    else:
        job.finish()
        return {"whole": False}
    model = job.model("guest", base=plexrl.Init(CONFIG))
    tokens = model.generate([[1, 2]], n=LONG, max_tokens=4, seed=1)
    endless = model.generate.submit([[1, 2]], n=ENDLESS, max_tokens=4, seed=2)
    while endless.state in ("UNSPECIFIED", "PENDING", "DISPATCHED"):
        time.sleep(0.01)
    endless.cancel()
    cancelled = endless.exception(WAIT_S)
    if not isinstance(cancelled, plexrl.errors.CallCancelled):
        raise AssertionError(f"a call that was cancelled ended with {cancelled!r}")
    model.delete()
    job.finish()
    return {"whole": True, "tokens": [list(map(int, row)) for row in tokens.token_ids]}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
