"""What a job does, as processes of the engine: its iterations on one colocated group, or on two, one for each side.

A process is deterministic: every duration was drawn with the job. Scales say how a form differs from the class's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from plexrl_controller.simulation.engine import Counter, Process, Simulation
from plexrl_controller.simulation.pools import GENERATE, TRAIN, Resident
from plexrl_controller.simulation.rollout import Consolidation
from plexrl_controller.simulation.workload import Job


@dataclass(frozen=True, slots=True)
class Form:
    """How a job runs, relative to its class's own form."""

    rollout_gpus: int
    """0: colocated on the training GPUs."""
    train_gpus: int
    staleness: int = 0
    rollout_scale: float = 1.0
    train_scale: float = 1.0
    hide_tail: bool = False
    """Rollouts are streamed: training takes whatever is finished, and tool calls overlap other responses."""
    consolidation: tuple[int, int] | None = None
    """Replicas for the bulk and for the tail of a rollout, where tails are consolidated."""

    @property
    def colocated(self) -> bool:
        """One group for both sides."""
        return self.rollout_gpus == 0

    @property
    def gpus(self) -> int:
        """Of both sides."""
        return self.rollout_gpus + self.train_gpus


@dataclass(slots=True)
class Execution:
    """A job that runs: where, and what it has done. Seconds of simulated time."""

    job: Job
    form: Form
    residents: tuple[Resident, ...]
    """Of the rollout group and the training group, or of the one colocated group."""
    launched_at: float
    """When it began to run, after its cold start."""
    ends: list[float] = field(default_factory=list)
    charges: list[float] = field(default_factory=list)
    """GPU-seconds charged when it started, and at the end of each iteration."""
    generated_at: list[float] = field(default_factory=list)
    """End of each rollout, where the form is split."""

    def charge(self) -> float:
        """GPU-seconds charged so far, up to a constant."""
        return sum([resident.group.charged_gpu_s() for resident in self.residents])


Profile = Callable[[int], Consolidation]
"""The parts of a consolidated rollout, by the iteration's profile."""


def launch(
    simulation: Simulation, execution: Execution, finished: Callable[[Execution], None], profile: Profile | None
) -> None:
    """Starts the job's processes; `finished` is called at the end of its last iteration."""
    execution.launched_at = simulation.now
    execution.charges.append(execution.charge())
    if execution.form.colocated:
        simulation.start(_colocated(simulation, execution, finished))
        return
    trained, generated = Counter(simulation), Counter(simulation)
    simulation.start(_trainer(simulation, execution, generated, trained, finished))
    simulation.start(_generator(simulation, execution, generated, trained, profile))


def _iteration_ended(simulation: Simulation, execution: Execution, finished: Callable[[Execution], None]) -> None:
    execution.ends.append(simulation.now)
    execution.charges.append(execution.charge())
    if len(execution.ends) == len(execution.job.iterations):
        finished(execution)


def _colocated(simulation: Simulation, execution: Execution, finished: Callable[[Execution], None]) -> Process:
    resident, form = execution.residents[0], execution.form
    for it in execution.job.iterations:
        last = len(it.turns) - 1
        for n, busy in enumerate(it.turns):
            yield resident.run(GENERATE, busy * form.rollout_scale, mid_phase=n < last)
            if n < last:
                yield resident.stall(it.stalls[n], it.hints[n])
        yield resident.stall(it.reward, it.reward_hint)
        yield resident.run(TRAIN, it.train * form.train_scale + it.sync, ends_iteration=True)
        _iteration_ended(simulation, execution, finished)


def _generator(
    simulation: Simulation, execution: Execution, generated: Counter, trained: Counter, profile: Profile | None
) -> Process:
    """The rollout side. With staleness n it may be n iterations ahead of the training side."""
    resident, form = execution.residents[0], execution.form
    for i, it in enumerate(execution.job.iterations):
        yield trained.reaches(i - form.staleness)
        sync = it.sync if form.staleness else 0.0
        if profile is not None:
            parts = profile(it.profile)
            yield resident.run(GENERATE, it.rollout * parts.main + sync)
            yield resident.stall(it.rollout * parts.tail, it.rollout * parts.tail)
        elif form.hide_tail:
            yield resident.run(GENERATE, it.rollout * form.rollout_scale + sync)
        else:
            last = len(it.turns) - 1
            for n, busy in enumerate(it.turns):
                after = sync if n == last else 0.0
                yield resident.run(GENERATE, busy * form.rollout_scale + after, mid_phase=n < last)
                if n < last:
                    yield resident.stall(it.stalls[n], it.hints[n])
        execution.generated_at.append(simulation.now)
        generated.increment()


def _trainer(
    simulation: Simulation,
    execution: Execution,
    generated: Counter,
    trained: Counter,
    finished: Callable[[Execution], None],
) -> Process:
    """The training side: reward (hidden where rollouts are streamed), log-probabilities, training, sync."""
    resident, form = execution.residents[-1], execution.form
    for i, it in enumerate(execution.job.iterations):
        yield generated.reaches(i + 1)
        reward_s = execution.generated_at[i] + it.reward - simulation.now
        if reward_s > 0.0 and not form.hide_tail:
            yield resident.stall(reward_s, it.reward_hint)
        yield resident.run(TRAIN, it.train * form.train_scale + it.sync, ends_iteration=True)
        _iteration_ended(simulation, execution, finished)
        trained.increment()
