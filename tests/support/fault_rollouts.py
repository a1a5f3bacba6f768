"""A third client process of the fault matrix: conversations in sessions, and training, for ever.

    python -m tests.support.fault_rollouts ENDPOINT TOKEN_FILE JOB HISTORY ROUNDS PAUSE_S [alone]

A round opens a session, has conversations in it whose turns run together, and closes it; then it trains, so that the
tokens of the next one tell the whole state. Its turns take longer than a chunk, on the engine that the guest's jobs use
too: they are revoked, parked and go on. Beside it a session that nobody uses stays until it expires, and must then
refuse what is asked of it. A line of the history is a whole round, or a session that expired in the middle of one: the
round is then begun anew. `alone` asks for the same without sessions, on an engine that takes no time: what must come of
it.
"""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import plexrl
from tests.support import fault_guest

CONVERSATIONS, TURNS, SAMPLES = 4, 2, 2
TOGETHER = 3
"""Fewer than there are conversations: one waits until there is room in the session."""
TOOL_S = 0.02
TRAINING_CALLS = 3
WAIT_S = 600.0
LEASE_S = 600.0
IDLE_LIMIT_S = 10.0
"""The least that a session may have: what a life of this process left goes soon. Between two turns a session is there
for less, unless no controller answers.
"""
SEED = 5
ALONE_CONFIG = {key: value for key, value in fault_guest.CONFIG.items() if key != "plexrl_fake"}


def main(
    endpoint: str, token_file: str, name: str, history_file: str, rounds: int, pause_s: float, alone: bool
) -> None:
    """Takes the job up, or begins it, and runs rounds."""
    with (
        plexrl.connect(endpoint, token=Path(token_file).read_text().strip()) as cluster,
        open(history_file, "a", buffering=1) as history,
    ):
        try:
            job = cluster.attach(name)
        except plexrl.errors.NotFound:
            job = cluster.job(name, lease_s=LEASE_S)
        if "policy" not in job.models:
            job.model("policy", base=plexrl.Init(ALONE_CONFIG if alone else fault_guest.CONFIG, seed=SEED))
        model = job.models["policy"]
        for future in job.unacknowledged:
            future.result(WAIT_S)
        number, trained = divmod(model._describe().next_sequence - 1, TRAINING_CALLS)
        if trained:
            train(model, number, trained)
            number += 1
        left = None if alone else opened(model)
        while number < rounds:
            line: dict[str, object] = {"round": number}
            if alone:
                line |= converse(model.generate, lambda _: nullcontext(), number)
            else:
                session = opened(model)
                try:
                    with session:
                        line |= converse(session.generate, session.sleeping, number)
                except plexrl.SessionEnded:
                    history.write(json.dumps({"expired": session.session_id}) + "\n")
                    continue
                line |= {"session": session.session_id, "ended": session.state}
            line |= train(model, number, 0)
            if left is not None and left.state == "EXPIRED":
                check_refuses(left)
                line["expired"] = left.session_id
                left = opened(model)
            history.write(json.dumps(line) + "\n")
            number += 1
            time.sleep(pause_s)
        job.detach()


def opened(model: plexrl.Model) -> plexrl.Session:
    """A session; where earlier lives of this process left as many as may be, once one of them goes."""
    while True:
        try:
            return model.session(max_concurrent=TOGETHER, grace_s=0.0, idle_limit_s=IDLE_LIMIT_S)
        except plexrl.ResourceExhausted:
            time.sleep(1.0)


def converse(
    generate: Callable[..., plexrl.Completions],
    sleeping: Callable[[float], AbstractContextManager[None]],
    number: int,
) -> dict[str, object]:
    """The conversations of a round, side by side: the versions that sampled their turns, and the tokens."""

    def conversation(seed: int) -> list[tuple[int, list[list[int]]]]:
        turns: list[tuple[int, list[list[int]]]] = []
        tokens = [1 + seed % 20, 2]
        for turn in range(TURNS):
            completions = generate([tokens], n=SAMPLES, max_tokens=4, seed=seed * TURNS + turn)
            sampled = [list(map(int, row)) for row in completions.token_ids]
            turns.append((completions.weights_version, sampled))
            tokens = tokens + sampled[0]
            with sleeping(TOOL_S):
                time.sleep(TOOL_S)
        return turns

    with ThreadPoolExecutor(CONVERSATIONS) as threads:
        seeds = range(number * CONVERSATIONS, (number + 1) * CONVERSATIONS)
        return {"turns": list(threads.map(conversation, seeds))}


def train(model: plexrl.Model, number: int, sent: int) -> dict[str, object]:
    """The training calls of a round that were not sent before, and what the whole of them came to."""
    batch = plexrl.TrainingBatch.from_targets([[1, 2 + number % 5]], [[3, 4 + number % 7]])
    calls: list[Callable[[], Any]] = [
        lambda: model.forward_backward.submit(batch, loss="cross_entropy"),
        lambda: model.optim_step.submit(lr=1e-2),
        lambda: model.sync_weights.submit(),
    ]
    results = [future.result(WAIT_S) for future in [call() for call in calls[sent:]]]
    return {"optim": results[1].step, "version": results[2].weights_version} if not sent else {}


def check_refuses(session: plexrl.Session) -> None:
    """A session that expired says so, by its type."""
    heard = session.generate.submit([[1]], max_tokens=1).exception(WAIT_S)
    if not isinstance(heard, plexrl.SessionEnded):
        raise AssertionError(f"a session that expired answered {heard!r}")


if __name__ == "__main__":
    alone = sys.argv[7:] == ["alone"]
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), float(sys.argv[6]), alone)
