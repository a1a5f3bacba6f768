"""A client process of the fault matrix: trains on one worker and samples on another, for ever.

    python -m tests.support.fault_pulls ENDPOINT TOKEN_FILE JOB HISTORY ROUNDS PAUSE_S [alone]

A round trains, publishes a version, pulls it to the other worker and samples both models with one seed: they must say
the same, bit for bit, and the rollouts once more after a while. All of it is sent at once, so that the pull waits for
its version, and the next version for the pull. Some rounds end with a version that replaces one while it is being
pulled. What the policy is asked follows from
the number of the round alone; the rollouts are asked again for what was lost with their worker. A line of the history
is a whole round. `alone` asks for the policy's part: what must come of it.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import plexrl

CALLS_PER_ROUND = 3
REPLACE_EVERY = 2
"""Rounds; the last of so many has one more call."""
STAYS_S = 0.2
"""How long the rollouts, and the policy, then stay as they are."""
WAIT_S = 600.0
LEASE_S = 600.0
PROMPTS = [[1], [2, 1]]
# Four pieces on the wire: 4 MiB of weights.
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 1024, "max_position_embeddings": 64}
SEED = 3


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
            job.model("policy", base=plexrl.Init(CONFIG, seed=SEED))
        policy = job.models["policy"]
        if "rollouts" not in job.models and not alone:
            job.model(
                "rollouts",
                base=plexrl.Init(CONFIG, seed=SEED + 1),
                role="rollout",
                affinity=plexrl.Affinity(avoid=[policy]),
            )
        for future in job.unacknowledged:
            ended = future.exception(WAIT_S)
            if ended is not None and not isinstance(ended, LOST | plexrl.errors.VersionGone):
                raise ended
        done, number = policy._describe().next_sequence - 1, 0
        while calls_before(number + 1) <= done:
            number += 1
        sent = done - calls_before(number)
        while number < rounds:
            line = run_round(policy, None if alone else job.models["rollouts"], number, sent)
            if line is not None:
                history.write(json.dumps({"round": number, **line}) + "\n")
            number, sent = number + 1, 0
            time.sleep(pause_s)
        job.detach()


def calls_before(number: int) -> int:
    """Sequenced calls of the policy before a round."""
    return CALLS_PER_ROUND * number + number // REPLACE_EVERY


def run_round(policy: plexrl.Model, rollouts: plexrl.Model | None, number: int, sent: int) -> dict[str, Any] | None:
    """The calls of a round that were not sent before; what they came to, when the whole round was this life's."""
    batch = plexrl.TrainingBatch.from_targets([[1, 2 + number % 5]], [[3, 4 + number % 7]])
    calls: list[Callable[[], Any]] = [
        lambda: policy.forward_backward.submit(batch, loss="cross_entropy"),
        lambda: policy.optim_step.submit(lr=0.5),
        lambda: policy.sync_weights.submit(),
    ]
    futures = [call() for call in calls[sent:]]
    line: dict[str, Any] = {}
    if sent < CALLS_PER_ROUND:
        line = {} if rollouts is None else taken(rollouts, policy, number)
        at_source = policy.generate(PROMPTS, n=2, max_tokens=8, seed=number, logprobs=True)
        line |= {"at_source": digest(at_source), "sampled": at_source.weights_version}
    results = [future.result(WAIT_S) for future in futures]
    if rollouts is not None and not sent:
        line["again"] = again(rollouts, number)
    if number % REPLACE_EVERY == REPLACE_EVERY - 1:
        replace(policy, rollouts)
        if rollouts is not None:
            with suppress(plexrl.errors.StateLost):
                line["later"] = again(rollouts, number)
    return None if sent else {"optim": results[1].step, "version": results[2].weights_version, **line}


LOST = plexrl.errors.StateLost | plexrl.errors.PredecessorFailed


def taken(rollouts: plexrl.Model, policy: plexrl.Model, seed: int) -> dict[str, Any]:
    """A pull, and what is sampled with it; again where the rollouts were lost in between."""
    while True:
        try:
            pull = rollouts.pull_weights.submit(policy)
            sampling = rollouts.generate.submit(PROMPTS, n=2, max_tokens=8, seed=seed, logprobs=True)
            pulled, sampled = pull.result(WAIT_S), sampling.result(WAIT_S)
        except plexrl.errors.PredecessorFailed:
            resume(rollouts)
        except plexrl.errors.StateLost:
            time.sleep(0.05)
        else:
            return {
                "source": pulled.source_version, "pulled": pulled.weights_version,
                "elsewhere": sampled.weights_version, "tokens": digest(sampled),
            }  # fmt: skip


def replace(policy: plexrl.Model, rollouts: plexrl.Model | None) -> None:
    """A version that does not wait for the pull of the one before it; the pull may have been quicker."""
    pull = None if rollouts is None else rollouts.pull_weights.submit(policy)
    while pull is not None and pull.state in ("UNSPECIFIED", "PENDING"):
        time.sleep(0.002)
    policy.sync_weights.submit(in_flight="abort").result(WAIT_S)
    if pull is None or rollouts is None:
        return
    match pull.exception(WAIT_S):
        case None | plexrl.errors.StateLost():
            pass
        case plexrl.errors.VersionGone() | plexrl.errors.PredecessorFailed():
            resume(rollouts)
        case error:
            raise error


def again(rollouts: plexrl.Model, seed: int) -> tuple[int, str]:
    """After a while what was sampled is sampled once more: the version, and what came of it. While the policy has what
    was pulled it is there, whatever died meanwhile; once the policy has gone on it may be lost.
    """
    time.sleep(STAYS_S)
    sampled = rollouts.generate(PROMPTS, n=2, max_tokens=8, seed=seed, logprobs=True)
    return sampled.weights_version, digest(sampled)


def resume(rollouts: plexrl.Model) -> None:
    """After a pull that ended otherwise than well; where the state is lost too, the next pull is the way out."""
    with suppress(plexrl.errors.StateLost):
        rollouts.resume()


def digest(completions: plexrl.Completions) -> str:
    """Tokens, and their log-probabilities to the last bit: which weights made them."""
    raw = completions.flat_token_ids.tobytes() + completions.flat_logprobs.tobytes()
    return hashlib.sha256(raw).hexdigest()


if __name__ == "__main__":
    is_alone = sys.argv[7:] == ["alone"]
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), float(sys.argv[6]), is_alone)
