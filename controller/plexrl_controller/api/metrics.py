"""The figures of a controller, for those who run the GPUs: what memory holds at one moment, under Prometheus names.

They are counted when they are asked for, in one pass over the live records: no call does anything for them, and no
store is asked. Knows nothing of HTTP and threads. A label is a name of a worker, a tenant or a live job, or a state;
never the id of a call.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from plexrl.v1 import types_pb2
from plexrl_controller.dispatch.core import Core
from plexrl_controller.dispatch.ledger import Ledger, live_jobs
from plexrl_controller.domain.ids import WorkerId
from plexrl_controller.domain.records import Worker
from plexrl_controller.domain.states import CallState, JobState, ModelState, WorkerState
from plexrl_controller.lifecycle import jobs, models
from plexrl_controller.version import VERSION

Sample = tuple[Sequence[str], float]
"""Values of the labels, and the figure."""

TIERS = {"device": types_pb2.TIER_DEVICE, "host": types_pb2.TIER_HOST, "disk": types_pb2.TIER_DISK}


def figures(core: Core | None, certificate_end: float | None) -> list[Metric]:
    """All figures at this moment; of a controller that does not lead (no core, or its writer has stopped) only those
    of the process, because others may have changed since what its memory holds.
    """
    leads = core is not None and core.writer.is_open
    found = [
        InfoMetricFamily("plexrl_build", "The version of the controller.", {"version": VERSION}),
        _gauge("plexrl_leader", "1 while this controller leads, as far as it knows, and serves; else 0.", leads),
    ]
    if certificate_end is not None:
        text = "When the first certificate of the chain ends with which the server was started, in Unix time."
        found.append(_gauge("plexrl_tls_certificate_expiry_timestamp_seconds", text, certificate_end))
    if core is not None and leads:
        now = core.clock.now()
        found.append(_gauge("plexrl_leader_term", "The term that this controller leads in.", core.term))
        for part in (_records(core.ledger), _jobs(core.ledger), _workers(core.ledger, now), _service(core)):
            found.extend(part)
    return found


def _records(ledger: Ledger) -> Iterator[Metric]:
    live = [state for state in JobState if state not in jobs.TERMINAL]
    yield _by_state("plexrl_jobs", "Jobs that have not ended.", live, (j.state for j in ledger.jobs.values()))
    live_models = [state for state in ModelState if state not in models.TERMINAL]
    models_found = (model.state for model in ledger.models.values())
    yield _by_state("plexrl_models", "Models that are neither deleted nor failed.", live_models, models_found)
    text = "Calls in memory: those that have not ended, and those whose client has not acknowledged how they ended."
    yield _by_state("plexrl_calls", text, CallState, (call.state for call in ledger.calls.values()))
    workers_found = (worker.state for worker in ledger.workers.values())
    yield _by_state("plexrl_workers", "Workers that ever registered.", WorkerState, workers_found)


def _jobs(ledger: Ledger) -> Iterator[Metric]:
    live = live_jobs(ledger)
    accounts = [((job.tenant, job.name), ledger.account(job.job_id)) for job in live]
    spent = [
        ((*names, kind), seconds)
        for names, account in accounts
        for kind, seconds in (("busy", account.busy_s), ("swap", account.swap_s), ("hold", account.hold_s))
    ]
    # Prometheus names what it scrapes `job` and would rename a label of that name.
    labels = ("tenant", "job_name")
    text = "Device time of a live job: its calls, moving its models, and held while the job had nothing to run."
    yield _counters("plexrl_job_device_seconds_total", text, (*labels, "kind"), spent)
    swaps = [(names, account.swaps) for names, account in accounts]
    yield _counters("plexrl_job_swaps_total", "Moves of a live job's models to or from a device.", labels, swaps)
    ended = [
        ((job.tenant, job.name), ledger.account(job.job_id).calls + ledger.facts[job.job_id].calls_succeeded)
        for job in live
    ]
    yield _counters("plexrl_job_calls_succeeded_total", "Calls of a live job that succeeded.", labels, ended)


def _workers(ledger: Ledger, now: float) -> Iterator[Metric]:
    workers = sorted(ledger.workers.values(), key=lambda worker: worker.name)
    alive = [worker for worker in workers if worker.state is not WorkerState.LOST]
    groups, waiting = ledger.groups, _waiting(ledger)

    def each(name: str, text: str, of: Iterable[Worker], value: Callable[[WorkerId], float]) -> Metric:
        return _gauges(name, text, ("worker",), [((worker.name,), value(worker.worker_id)) for worker in of])

    yield each(
        "plexrl_worker_connected", "1 while orders can be sent to the worker.", workers, lambda w: groups[w].connected
    )
    yield each(
        "plexrl_worker_cordoned",
        "1 while an operator keeps new models off the worker.",
        workers,
        lambda w: ledger.workers[w].cordoned,
    )
    yield each(
        "plexrl_worker_synchronize_age_seconds",
        "Time since the worker last renewed its lease; since the controller's start if it has not done so.",
        workers,
        lambda w: max(0.0, now - groups[w].last_sync),
    )
    yield each(
        "plexrl_worker_pending_calls",
        "Calls that wait to be given to the worker.",
        workers,
        lambda w: len(waiting.get(w, ())),
    )
    yield each(
        "plexrl_worker_oldest_pending_call_age_seconds",
        "Time since the oldest call that waits to be given to the worker was submitted; 0 where none waits.",
        workers,
        lambda w: max(0.0, now - min(waiting.get(w, ()), default=now)),
    )
    yield each(
        "plexrl_worker_calls_in_flight",
        "Calls that the worker is to execute, those that gave way left out.",
        workers,
        lambda w: len(ledger.in_flight(w)),
    )
    yield each(
        "plexrl_worker_models_on_device",
        "Models whose whole state is on the device, or ordered there.",
        alive,
        lambda w: len(groups[w].on_device),
    )
    yield each(
        "plexrl_worker_resident_memory_bytes",
        "Resident set of the daemon and its engines.",
        alive,
        lambda w: groups[w].resident_bytes,
    )
    text = "Model state that lies on each tier of the worker."
    tiers = [((worker.name, tier), size) for worker in alive for tier, size in _tiers(ledger, worker.worker_id)]
    yield _gauges("plexrl_worker_model_bytes", text, ("worker", "tier"), tiers)


def _service(core: Core) -> Iterator[Metric]:
    writer = core.writer
    text = "Decisions that were not carried out because they broke an invariant, since this controller's start."
    yield _counter("plexrl_scheduling_invariant_violations_total", text, core.invariant_violations)
    text = "Calls that were executed again with another result than the recorded one, since this controller's start."
    yield _counter("plexrl_replay_divergences_total", text, core.replay_divergences)
    yield _gauge("plexrl_store_queued_rows", "Rows that are not in the database yet.", writer.queued_rows)
    counters = writer.counters
    yield _counter("plexrl_store_commits_total", "Group commits since this controller's start.", counters.commits)
    text = "Tries to commit that the database did not answer, since this controller's start."
    yield _counter("plexrl_store_commit_retries_total", text, counters.retries)
    text = "Time spent in commits, tries that failed included, since this controller's start."
    yield _counter("plexrl_store_commit_seconds_total", text, counters.commit_s)
    tenants = {job.tenant for job in live_jobs(core.ledger)}
    tenants |= {t.tenant for t in core.ledger.tokens.values() if t.tenant is not None and not t.revoked}
    stored = [((tenant,), core.payloads.stored_bytes(tenant)) for tenant in sorted(tenants)]
    text = "Payloads that a tenant with a live job or a valid token has stored."
    yield _gauges("plexrl_payload_stored_bytes", text, ("tenant",), stored)
    text = "Payloads that each tenant may have stored."
    yield _gauge("plexrl_payload_quota_bytes", text, core.payloads.quota_bytes)


def _waiting(ledger: Ledger) -> dict[WorkerId, list[float]]:
    """When the pending calls of each worker's models were submitted."""
    submitted: dict[WorkerId, list[float]] = {}
    for call in ledger.calls.values():
        if call.state is CallState.PENDING:
            model = ledger.models.get(call.model_id)
            if model is not None and model.worker_id is not None:
                submitted.setdefault(model.worker_id, []).append(call.create_time)
    return submitted


def _tiers(ledger: Ledger, worker_id: WorkerId) -> Iterable[tuple[str, int]]:
    components = [c for model_id in ledger.models_of_worker[worker_id] for c in ledger.residency.get(model_id, ())]
    return [(name, sum(c.size_bytes for c in components if c.tier == tier)) for name, tier in TIERS.items()]


def _by_state(name: str, text: str, states: Iterable[IntEnum], found: Iterable[IntEnum]) -> Metric:
    """How many are in each of the states, none included; others are not counted."""
    counted = Counter(found)
    return _gauges(name, text, ("state",), [((state.name.lower(),), counted[state]) for state in states])


def _gauge(name: str, text: str, value: float) -> Metric:
    return _gauges(name, text, (), [((), value)])


def _gauges(name: str, text: str, labels: Sequence[str], samples: Iterable[Sample]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, figure in samples:
        family.add_metric(values, figure)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return _counters(name, text, (), [((), value)])


def _counters(name: str, text: str, labels: Sequence[str], samples: Iterable[Sample]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, figure in samples:
        family.add_metric(values, figure)
    return family
