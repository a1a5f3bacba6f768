"""Runs the demo's jobs on a local cluster, in phases, and records what each step cost.

The jobs are the ones of `client/examples`, unchanged; this module only starts them, alone or together, from the same
checkpoint with the same draws, and reads the service's accounts around them.
"""

import hashlib
import importlib
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import plexrl
from plexrl import errors
from plexrl.at_once import at_once
from plexrl.cli import timeline
from plexrl.v1 import types_pb2 as t

EXAMPLES = Path(plexrl.__file__).resolve().parent.parent / "examples"
TASKS = ("reverse", "interleave")
BARRIER_TIMEOUT_S = 300.0

Progress = Callable[[str], None]


def load_example(name: str) -> Any:
    """A module of client/examples. Raises ConfigurationError outside a source checkout."""
    if not (EXAMPLES / f"{name}.py").is_file():
        raise errors.ConfigurationError(f"the demo runs the jobs in {EXAMPLES}, which a source checkout has; clone one")
    if str(EXAMPLES.parent) not in sys.path:
        sys.path.insert(0, str(EXAMPLES.parent))
    return importlib.import_module(f"examples.{name}")


@dataclass
class JobRun:
    """One job in one phase. Seconds of device time are what the service charged between first and last step."""

    name: str
    steps: list[Any] = field(default_factory=list)
    """grpo.Step of each step, in order."""
    busy_s: float = 0.0
    swap_s: float = 0.0
    swaps: int = 0
    reward_before: float = 0.0
    reward_after: float = 0.0
    state_bytes: int = 0
    fingerprints: dict[int, str] = field(default_factory=dict)
    """Step number to SHA-256 over the whole training state after it."""
    warm_checkpoint: str = ""

    @property
    def wall_s(self) -> float:
        """Seconds in steps."""
        return float(sum(step.wall_s for step in self.steps))


@dataclass
class Phase:
    """A phase's jobs and the device's timeline during it."""

    jobs: dict[str, JobRun]
    intervals: list[t.DeviceInterval] = field(default_factory=list)
    job_names: dict[str, str] = field(default_factory=dict)
    worker_names: dict[str, str] = field(default_factory=dict)


class Stalls:
    """How long one job's tools take in the mean, by step; the draws around it are the job's.

    Tools take as long as they take, whatever the device: on another machine fixed stalls would make another demo. So
    they are set step by step while the job runs alone, for a share of its time that the device is busy, and are the
    same again when it shares.
    """

    def __init__(self, busy_share: float) -> None:
        self._busy_share = busy_share
        self._means_s: list[float] = []

    def set_next(self, busy_s: float, steps: int) -> None:
        """The next step's, from so many seconds of device time in so many steps."""
        self._means_s.append(busy_s / steps * (1.0 / self._busy_share - 1.0))

    def mean_s(self, step: int) -> float:
        """Of a step, counted from 1; steps beyond those that were set take the last one's."""
        return self._means_s[min(step, len(self._means_s)) - 1]


@dataclass(frozen=True)
class Endpoint:
    """Where the cluster is."""

    address: str
    token: str

    def connect(self) -> plexrl.Cluster:
        """A new connection: each job has its own, like jobs of different people."""
        return plexrl.connect(self.address, token=self.token)


def warm_up(endpoint: Endpoint, seed: int, tell: Progress) -> dict[str, JobRun]:
    """Both jobs imitate right answers until some samples are right, and save where they stand."""

    def work(run: JobRun, job: plexrl.Job, policy: plexrl.Model, task: Any, grpo: Any) -> None:
        settings = grpo.Settings(seed=seed)
        steps = grpo.imitate(policy, task, settings)
        policy.sync_weights()
        run.reward_before = grpo.evaluate(policy, task, settings)
        run.warm_checkpoint = policy.save_checkpoint("warm").checkpoint_id
        run.state_bytes = policy.state_bytes
        tell(f"{run.name}: {steps} imitation steps, {run.reward_before:.2f} of held-out answers right")

    return _together(endpoint, "warm", TASKS, seed, work, {}).jobs


def reinforce(
    endpoint: Endpoint,
    label: str,
    names: Sequence[str],
    seed: int,
    steps: int,
    warm: dict[str, JobRun],
    tell: Progress,
    *,
    stalls: Mapping[str, Stalls],
    set_stalls: bool = False,
    fingerprint_at: int | None = None,
    evaluate: bool = False,
) -> Phase:
    """The named jobs at once, `steps` GRPO steps each, from their warm checkpoints.

    set_stalls: whether each step sets the stall of the next.
    """

    def work(run: JobRun, job: plexrl.Job, policy: plexrl.Model, task: Any, grpo: Any) -> None:
        policy.load_checkpoint(warm[run.name].warm_checkpoint)
        start.wait(BARRIER_TIMEOUT_S)
        before = job.account()

        def on_step(step: Any) -> None:
            run.steps.append(step)
            if set_stalls:
                stalls[run.name].set_next(job.account().busy_s - before.busy_s, step.number)
            if step.number == fingerprint_at:
                run.fingerprints[step.number] = fingerprint(policy, f"step-{step.number}")
            tell(f"{label} {run.name}: step {step.number}/{steps}, reward {step.reward:.2f}")

        settings = replace(grpo.Settings(seed=seed), steps=steps)
        grpo.reinforce(job, policy, task, settings, on_step=on_step, stall_mean_s=stalls[run.name].mean_s)
        after = job.account()
        run.busy_s = after.busy_s - before.busy_s
        run.swap_s = after.swap_s - before.swap_s
        run.swaps = after.swaps - before.swaps
        if evaluate:
            run.reward_before = warm[run.name].reward_before
            run.reward_after = grpo.evaluate(policy, task, settings)

    start = threading.Barrier(len(names))
    return _together(endpoint, label, names, seed, work, warm)


def fingerprint(policy: plexrl.Model, label: str) -> str:
    """SHA-256 over the tensors of a full checkpoint: weights, moments, gradients."""
    with tempfile.TemporaryDirectory(prefix="plexrl-demo-") as folder:
        exported = policy.export(policy.save_checkpoint(label), Path(folder) / "export", training_state=True)
        files = sorted(path for path in exported.iterdir() if path.suffix == ".safetensors")
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()


def _together(
    endpoint: Endpoint,
    label: str,
    names: Sequence[str],
    seed: int,
    work: Callable[[JobRun, plexrl.Job, plexrl.Model, Any, Any], None],
    warm: dict[str, JobRun],
) -> Phase:
    """Each job in a thread with a connection of its own; the first failure is raised once all have ended."""
    grpo = load_example("grpo")
    runs = {name: JobRun(name) for name in names}
    job_ids: dict[str, str] = {}

    def body(name: str) -> None:
        task = load_example(name).TASK
        with endpoint.connect() as cluster, cluster.job(f"{label}-{name}") as job:
            job_ids[job.job_id] = name
            policy = job.model("policy", base=plexrl.Init(task.config, seed=seed))
            policy.wait_until_placed()
            work(runs[name], job, policy, task, grpo)

    at_once(body, names)
    with endpoint.connect() as cluster:
        intervals = [i for i in timeline.read_intervals(cluster.connection) if i.job_id in job_ids]
        _, workers = timeline.read_names(cluster.connection)
    return Phase(runs, intervals, job_ids, workers)
