"""An operator's two files: the cluster, and the workload. Sizes in GB (10^9 bytes), times as named."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from plexrl_controller.simulation.operator.fields import InputError, load_yaml, read
from plexrl_controller.simulation.workload import (
    BY_NAME,
    GeneratorSettings,
    Hardware,
    Job,
    JobClass,
    generate,
    iterations_of,
)


@dataclass(frozen=True, slots=True)
class Node:
    """What a node offers."""

    gpus: int = 8
    device_gb: float = 80.0
    host_gb: float = 2000.0
    link_gb_per_s: float = 16.0
    """Of each GPU, host to device and back."""
    disk_gb_per_s: float = 7.0
    network_gb_per_s: float = 25.0


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """cluster.yaml."""

    gpus: int
    node: Node = field(default_factory=Node)
    state_share: float = 0.75
    """Part of a device that model state may take; the rest is for activations and KV."""
    swap_fixed_s: float = 0.5
    cold_start_s: float = 48.0

    def hardware(self) -> Hardware:
        """In bytes and seconds."""
        node = self.node
        return Hardware(
            node_gpus=node.gpus,
            device_bytes=node.device_gb * 1e9,
            state_share=self.state_share,
            node_host_bytes=node.host_gb * 1e9,
            link_bytes_per_s=node.link_gb_per_s * 1e9,
            swap_fixed_s=self.swap_fixed_s,
            disk_bytes_per_s=node.disk_gb_per_s * 1e9,
            network_bytes_per_s=node.network_gb_per_s * 1e9,
            cold_start_s=self.cold_start_s,
        )


@dataclass(frozen=True, slots=True)
class OwnClass:
    """A class of jobs as its owner knows it; seconds of one iteration on its own GPUs."""

    name: str
    parameters_b: float
    """Billions."""
    train_gpus: int
    rollout_s: float
    train_s: float
    rollout_gpus: int = 0
    """0: the job runs colocated on its training GPUs."""
    rollout_cv: float = 0.35
    turns: int = 1
    stall_s: float = 0.0
    stall_cv: float = 1.0
    reward_s: float = 0.0
    reward_cv: float = 0.0
    sync_s: float = 3.0
    staleness: int = 0
    replica_gpus: int = 1
    weight: float = 1.0
    """Of the generator."""

    def job_class(self) -> JobClass:
        """As the simulator has it."""
        colocated = self.train_gpus if self.rollout_gpus == 0 else None
        return JobClass(
            name=self.name,
            weight=self.weight,
            parameters=self.parameters_b * 1e9,
            rollout_gpus=self.rollout_gpus or self.train_gpus,
            train_gpus=self.train_gpus,
            colocated_gpus=colocated,
            rollout_s=self.rollout_s,
            rollout_cv=self.rollout_cv,
            turns=self.turns,
            stall_s=self.stall_s,
            stall_cv=self.stall_cv,
            reward_s=self.reward_s,
            reward_cv=self.reward_cv,
            train_s=self.train_s,
            sync_s=self.sync_s,
            staleness=self.staleness,
            replica_gpus=self.replica_gpus,
            batch_knee=31.0,
        )


@dataclass(frozen=True, slots=True)
class JobsLine:
    """Jobs of one class that arrive together."""

    job_class: str
    iterations: int
    count: int = 1
    arrival_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Generated:
    """Jobs of a mix, drawn until the load is reached."""

    load: float = 1.2
    """Useful busy GPU-seconds offered per GPU-second of `hours`."""
    hours: float = 8.0
    mean_iterations: float = 30.0
    classes: tuple[str, ...] = ()
    """Empty: all that the file defines, else those of plexbench."""


@dataclass(frozen=True, slots=True)
class WorkloadFile:
    """workload.yaml: `jobs`, or `generate`; own classes beside plexbench's."""

    seed: int = 0
    warm_up_h: float = 0.0
    """Left out of the figures."""
    classes: tuple[OwnClass, ...] = ()
    jobs: tuple[JobsLine, ...] = ()
    generate: Generated | None = None


def read_cluster(path: Path) -> ClusterFile:
    """Reads and checks cluster.yaml."""
    cluster = read(str(path), load_yaml(path), ClusterFile)
    if cluster.gpus < 1 or cluster.node.gpus < 1:
        raise InputError(f"{path}: gpus and node.gpus are {cluster.gpus} and {cluster.node.gpus}, want 1 or more")
    if not 0.0 < cluster.state_share <= 1.0:
        raise InputError(f"{path}: state_share is {cluster.state_share}, want a part of the device in (0, 1]")
    rates = ("link_gb_per_s", "disk_gb_per_s", "network_gb_per_s", "device_gb", "host_gb")
    for name in rates:
        if getattr(cluster.node, name) <= 0.0:
            raise InputError(f"{path}: node.{name} is {getattr(cluster.node, name)}, want a positive number")
    return cluster


def read_workload(path: Path, cluster: ClusterFile) -> tuple[WorkloadFile, tuple[Job, ...]]:
    """Reads and checks workload.yaml, and draws its jobs, in order of arrival."""
    workload = read(str(path), load_yaml(path), WorkloadFile)
    if bool(workload.jobs) == (workload.generate is not None):
        raise InputError(f"{path}: want either `jobs` or `generate`, not {'both' if workload.jobs else 'neither'}")
    classes = dict(BY_NAME)
    for index, own in enumerate(workload.classes):
        where = f"{path}.classes[{index}]"
        if own.name in classes:
            raise InputError(f"{where}: {own.name} is taken; choose another name")
        for name in ("parameters_b", "train_gpus", "rollout_s", "train_s", "turns", "replica_gpus"):
            if getattr(own, name) <= 0:
                raise InputError(f"{where}.{name}: is {getattr(own, name)}, want a positive number")
        classes[own.name] = own.job_class()
    if workload.generate is not None:
        return workload, _generated(str(path), workload, workload.generate, classes, cluster)
    return workload, _listed(str(path), workload, classes, cluster)


def _generated(
    where: str, workload: WorkloadFile, wanted: Generated, classes: dict[str, JobClass], cluster: ClusterFile
) -> tuple[Job, ...]:
    if wanted.load <= 0.0 or wanted.hours <= 0.0 or wanted.mean_iterations <= 0.0:
        raise InputError(f"{where}.generate: load, hours and mean_iterations must be positive numbers")
    names = wanted.classes or tuple(own.name for own in workload.classes) or tuple(BY_NAME)
    chosen = tuple(_class(f"{where}.generate.classes", name, classes) for name in names)
    settings = GeneratorSettings(
        cluster.gpus,
        wanted.load,
        workload.seed,
        window_s=wanted.hours * 3600.0,
        mean_iterations=wanted.mean_iterations,
        classes=chosen,
    )
    try:
        return generate(settings)
    except ValueError as error:
        raise InputError(f"{where}.generate: {error}") from error


def _listed(where: str, workload: WorkloadFile, classes: dict[str, JobClass], cluster: ClusterFile) -> tuple[Job, ...]:
    root = np.random.SeedSequence(workload.seed)
    jobs: list[Job] = []
    for index, line in enumerate(workload.jobs):
        place = f"{where}.jobs[{index}]"
        job_class = _class(place, line.job_class, classes)
        if line.iterations < 1 or line.count < 1:
            raise InputError(f"{place}: iterations and count are {line.iterations} and {line.count}, want 1 or more")
        if job_class.dedicated_gpus > cluster.gpus:
            raise InputError(
                f"{place}: {line.job_class} needs {job_class.dedicated_gpus} GPUs, the cluster has {cluster.gpus}"
            )
        for _ in range(line.count):
            rng = np.random.Generator(np.random.PCG64(root.spawn(1)[0]))
            drawn = iterations_of(job_class, line.iterations, rng)
            jobs.append(Job(len(jobs), job_class, line.arrival_h * 3600.0, drawn, 1.3, 1.0))
    return _by_arrival(jobs)


def _by_arrival(jobs: Sequence[Job]) -> tuple[Job, ...]:
    ordered = sorted(jobs, key=lambda job: (job.arrival_s, job.index))
    return tuple(replace(job, index=index) for index, job in enumerate(ordered))


def _class(where: str, name: str, classes: dict[str, JobClass]) -> JobClass:
    if name not in classes:
        raise InputError(f"{where}: no class {name!r}; there are {', '.join(sorted(classes))}")
    return classes[name]
