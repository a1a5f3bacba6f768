"""A client process of the fault matrix: trains two models for ever, and goes on where an earlier life of it stopped.

    python -m tests.support.fault_client ENDPOINT TOKEN_FILE JOB HISTORY STEPS PAUSE_S

Everything that it asks follows from the number of the step, so that a resumed run asks for the same as an undisturbed
one, and each step's scores tell the whole state. Every result is a line of the history: what was heard, once.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plexrl

CALLS_PER_STEP = 4
SAVE_EVERY = 8
"""Steps; the last of so many has one more call."""
WAIT_S = 600.0
LEASE_S = 600.0
MODELS = {"first": 24, "second": 32}


def config(vocab_size: int) -> dict[str, object]:
    """Two vocabularies are two engines, of which one has the device."""
    return {"architectures": ["Qwen3ForCausalLM"], "vocab_size": vocab_size, "max_position_embeddings": 64}


def main(endpoint: str, token_file: str, name: str, history_file: str, steps: int, pause_s: float) -> None:
    """Takes the job up, or begins it, and runs steps."""
    with (
        plexrl.connect(endpoint, token=Path(token_file).read_text().strip()) as cluster,
        open(history_file, "a", buffering=1) as history,
    ):
        try:
            job = cluster.attach(name)
        except plexrl.errors.NotFound:
            job = cluster.job(name, lease_s=LEASE_S)
        for model_name, vocab_size in MODELS.items():
            if model_name not in job.models:
                job.model(model_name, base=plexrl.Init(config(vocab_size), seed=3))
        for future in job.unacknowledged:
            future.result(WAIT_S)
        done = {model_name: model._describe().next_sequence - 1 for model_name, model in job.models.items()}
        step = 0
        while calls_before(step + 1) <= min(done.values()):
            step += 1
        while step < steps:
            for model_name, model in job.models.items():
                line = run_step(model, step, max(0, done[model_name] - calls_before(step)))
                if line is not None:
                    history.write(json.dumps({"model": model_name, "step": step, **line}) + "\n")
            step += 1
            time.sleep(pause_s)
        job.detach()


def calls_before(step: int) -> int:
    """Sequenced calls of a model before a step."""
    return CALLS_PER_STEP * step + step // SAVE_EVERY


def run_step(model: plexrl.Model, step: int, sent: int) -> dict[str, object] | None:
    """The calls of a step that were not sent before; what they came to, when the whole step was this life's."""
    batch = plexrl.TrainingBatch.from_targets([[1, 2 + step % 5]], [[3, 4 + step % 7]])
    calls: list[Callable[[], Any]] = [
        lambda: model.forward_backward.submit(batch, loss="cross_entropy"),
        lambda: model.optim_step.submit(lr=1e-2),
        lambda: model.sync_weights.submit(),
        lambda: model.score.submit([[1, 2, 3, 4, 5]]),
    ]
    if step % SAVE_EVERY == SAVE_EVERY - 1:
        calls.append(lambda: model.save_checkpoint.submit(f"step-{step}"))
    if sent >= len(calls):
        return None
    futures = [call() for call in calls[sent:]]
    sampled = model.generate([[1, 2], [3]], max_tokens=4, seed=step)
    results = [future.result(WAIT_S) for future in futures]
    if sent:
        return None
    trained, stepped, synced, scored = results[:CALLS_PER_STEP]
    digest = hashlib.sha256(scored.flat_logprobs.tobytes() + trained.flat_logprobs.tobytes()).hexdigest()
    return {"optim": stepped.step, "version": synced.weights_version, "sampled": sampled.weights_version,
            "tokens": [list(map(int, row)) for row in sampled.token_ids], "digest": digest}  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), float(sys.argv[6]))
