"""T7: what moving the last fifth of a rollout's responses to a few replicas frees, costs and gives.

Two jobs share a rollout group: while one job's tail runs on its few replicas, the other's bulk has the rest.
"""

from collections.abc import Mapping
from functools import partial
from statistics import fmean

from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.simulation import demands, rollout
from plexrl_controller.simulation.engine import Simulation
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.metrics import job_results
from plexrl_controller.simulation.plexbench.groups import generator
from plexrl_controller.simulation.plexbench.rows import Row, Runner, Task
from plexrl_controller.simulation.pools import SharedGroup, State, Totals
from plexrl_controller.simulation.processes import Execution, Form, launch
from plexrl_controller.simulation.workload import BY_NAME, PROFILES, Job, iterations_of


def rollout_pairs(job_class: str, tail_replicas: int, pairs: int, iterations: int, seed: int) -> Mapping[str, float]:
    """`pairs` rollout groups of two jobs each and one training group for all; no tail: a rollout group for each job."""
    c = BY_NAME[job_class]
    replicas = rollout.replicas_of(c, c.rollout_gpus)
    parts = (replicas - tail_replicas, tail_replicas) if tail_replicas else None
    form = Form(c.rollout_gpus, c.train_gpus, c.staleness, consolidation=parts)
    simulation, totals = Simulation(), Totals([], [])

    def group(name: str, gpus: int) -> SharedGroup:
        return SharedGroup(simulation, totals, name, gpus, LivePolicy(Policy(), Decisions()))

    train = group("train", c.train_gpus)
    executions, shared = [], train
    for index in range(2 * pairs):
        if parts is None or index % 2 == 0:
            shared = group(f"rollout{index}", c.rollout_gpus)
        job = Job(index, c, 0.0, iterations_of(c, iterations, generator(seed, index)), 1.3, 1.0)
        residents = (
            shared.join(index, job.name, State(f"{job.name}/rollout", 1.0, 0.0), None),
            train.join(index, job.name, None, State(f"{job.name}/train", 1.0, 0.0)),
        )
        executions.append(Execution(job, form, residents, 0.0))
    profile = partial(rollout.consolidation, c, main_replicas=parts[0], tail_replicas=parts[1]) if parts else None
    for execution in executions:
        launch(simulation, execution, lambda _: None, profile)
    simulation.run()
    until_s = min(execution.ends[-1] for execution in executions)
    results = job_results(executions, 2 * c.rollout_s, until_s)
    saving = 1.0 - sum(r.cost_gpu_s for r in results) / sum(r.dedicated_gpu_s for r in results)
    return {
        "freed": _freed(job_class, tail_replicas) if tail_replicas else 0.0,
        "stretch": demands.stretch(c, form),
        "saving": saving,
        "slowdown_mean": fmean(r.slowdown for r in results),
    }


def _freed(job_class: str, tail_replicas: int) -> float:
    """Part of the replicas' time that is free while the tail runs, with all replicas for the bulk."""
    c = BY_NAME[job_class]
    replicas = rollout.replicas_of(c, c.rollout_gpus)
    bank = [rollout.consolidation(c, p, replicas, tail_replicas) for p in range(PROFILES)]
    return fmean(part.tail / (part.main + part.tail) for part in bank) * (replicas - tail_replicas) / replicas


def table_7(reps: int, iterations: int, runner: Runner) -> list[Row]:
    """By class, replicas of the tail and jobs on the training group."""
    tasks = []
    for name in ("math-7B", "math-30B-A3B", "big-235B"):
        replicas = rollout.replicas_of(BY_NAME[name], BY_NAME[name].rollout_gpus)
        for pairs in (1, 2):
            for tail in sorted({0, 1, max(1, replicas // 8), max(1, replicas // 4)}):
                keys = {"job_class": name, "replicas": replicas, "tail_replicas": tail, "k": 2 * pairs}
                arguments = (name, tail, pairs, iterations)
                tasks.append((keys, [Task(rollout_pairs, (*arguments, rep)) for rep in range(reps)]))
    return runner.run_all("T7", tasks)
