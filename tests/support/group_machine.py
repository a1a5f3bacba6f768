"""One worker group in simulated time, driven by `next_slice`: the least that shows whether it keeps its promises.

It executes plans to the letter, checks the invariants of each, and remembers who waited for how long. No cost model: a
swap takes its model's `load_s`, calls run one after the other, whatever they were given together.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from plexrl_controller.domain.ids import CallId, JobId, ModelId, WorkerId
from plexrl_controller.domain.states import CallKind
from plexrl_controller.scheduling.invariants import violations
from plexrl_controller.scheduling.next_slice import next_slice
from plexrl_controller.scheduling.plan import Hold, Plan, Serve, Wait, Yield
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.scheduling.views import GroupView, JobView, ModelView, ReadyCall


@dataclass(frozen=True)
class Arrival:
    """At `at`, job `job` wants `service_s` of work on one of its models."""

    at: float
    job: int
    service_s: float
    model: int = 0


@dataclass
class Work:
    """A call, and what remains of it."""

    call_id: CallId
    model_id: ModelId
    remaining_s: float
    since: float


@dataclass
class MachineJob:
    """What the group knows of one job."""

    job_id: JobId
    model_bytes: dict[ModelId, int]
    load_s: float
    weight: float = 1.0
    holds: bool = True
    """It is always in the middle of something: rules that look at that hold the group as long as they ever do."""
    ready: list[Work] = field(default_factory=list)
    last_finish: float = 0.0
    last_served: float = 0.0
    attained_s: float = 0.0


@dataclass
class Machine:
    """A group, its jobs, and the arrivals to come."""

    jobs: list[MachineJob]
    device_bytes: int
    policy: Policy
    can_yield: bool = True
    estimates: bool = True
    background_moves: bool = False
    now: float = 0.0
    serving: JobId | None = None
    slice_start: float = 0.0
    chunk_start: float = 0.0
    running: list[Work] = field(default_factory=list)
    on_device: set[ModelId] = field(default_factory=set)
    dirty: set[ModelId] = field(default_factory=set)
    plans: list[Plan] = field(default_factory=list)
    waits: dict[JobId, float] = field(default_factory=dict)
    """Longest wait of each job: from having something to run, with nothing running, to being served."""
    stretches: list[float] = field(default_factory=list)
    """How long the group stayed with one job's calls without a chance for another."""
    held_s: float = 0.0
    prefetches: int = 0
    swaps: int = 0
    _queue: list[tuple[float, int, str, object]] = field(default_factory=list)
    _tick: int = 0
    _finish: int = 0
    _again: int = 0

    def run(self, arrivals: Iterable[Arrival], limit: int = 100_000) -> None:
        """Until nothing is left to do; at most `limit` events."""
        for index, arrival in enumerate(arrivals):
            self._push(arrival.at, "arrival", (index, arrival))
        for _ in range(limit):
            if not self._queue:
                return
            self.now, _, kind, what = heapq.heappop(self._queue)
            if kind == "arrival":
                self._arrive(*what)  # type: ignore[misc]
            elif kind == "finish" and what == self._finish:
                self._finished()
            elif kind == "finish" or (kind == "again" and what != self._again):
                continue
            self._decide()
        raise AssertionError(f"still busy after {limit} events: the group makes no progress")

    def view(self) -> GroupView:
        """The group now."""
        return GroupView(
            WorkerId("w"),
            True,
            self.device_bytes,
            tuple(self._job_view(job) for job in self.jobs),
            self.serving,
            self.slice_start,
            can_yield=self.can_yield,
            chunk_start=self.chunk_start,
            background_moves=self.background_moves,
        )

    def _job_view(self, job: MachineJob) -> JobView:
        return JobView(
            job.job_id,
            tuple(
                ModelView(
                    model_id,
                    size,
                    model_id in self.on_device,
                    ready=tuple(
                        ReadyCall(
                            w.call_id,
                            model_id,
                            CallKind.FORWARD_BACKWARD,
                            w.since,
                            expected_s=w.remaining_s if self.estimates else None,
                        )
                        for w in job.ready[:64]
                        if w.model_id == model_id
                    ),
                    dirty_bytes=size if model_id in self.dirty else 0,
                    changing=any(w.model_id == model_id for w in self.running),
                    load_s=job.load_s,
                )
                for model_id, size in job.model_bytes.items()
            ),
            in_flight=len(self.running) if job.job_id == self.serving else 0,
            in_flight_left_s=self._left_s() if self.estimates and job.job_id == self.serving else None,
            mid_phase=job.holds,
            mid_iteration=job.holds,
            last_finish=job.last_finish,
            round_trip_s=2 * job.load_s,
            attained_s=job.attained_s,
            last_served=job.last_served,
        )

    def _arrive(self, index: int, arrival: Arrival) -> None:
        job = self.jobs[arrival.job]
        model_id = list(job.model_bytes)[arrival.model % len(job.model_bytes)]
        job.ready.append(Work(CallId(f"c{index:05}"), model_id, arrival.service_s, self.now))

    def _finished(self) -> None:
        job = self._job(self.serving)
        work = self.running.pop(0)
        job.attained_s += work.remaining_s / job.weight
        job.last_finish = self.now
        self.dirty.add(work.model_id)
        if self.running:
            self._start(self.now)
        else:
            self.stretches.append(self.now - self.chunk_start)

    def _start(self, at: float) -> None:
        self._finish += 1
        self._push(at + self.running[0].remaining_s, "finish", self._finish)

    def _decide(self) -> None:
        while True:
            view = self.view()
            plan = next_slice(view, self.now, self.policy)
            broken = violations(view, plan)
            assert not broken, (broken, plan, view)
            assert plan == next_slice(view, self.now, self.policy), "the same view gave another plan"
            self.plans.append(plan)
            self._move(plan)
            match plan.action:
                case Serve() as serve:
                    self._serve(serve)
                    continue
                case Yield():
                    self._park()
                    continue
                case Hold(until=until):
                    assert plan.again_at == until
                case Wait():
                    waiting = [job.job_id for job in self.jobs if job.ready]
                    assert self.running or not waiting, f"{waiting} wait for an idle group"
            self._again += 1
            if plan.again_at is not None:
                assert plan.again_at > self.now
                self._push(plan.again_at, "again", self._again)
            return

    def _move(self, plan: Plan) -> None:
        """Background moves, done at once: what matters here is that they may be done."""
        for move in plan.background:
            if hasattr(move, "drop"):
                self.on_device -= set(move.drop)
                self.on_device.add(move.model_id)
                self.prefetches += 1
            else:
                self.dirty.discard(move.model_id)

    def _serve(self, serve: Serve) -> None:
        job = self._job(serve.job_id)
        chosen = {call.call_id for call in serve.calls}
        taken = [w for w in job.ready if w.call_id in chosen]
        job.ready = [w for w in job.ready if w.call_id not in chosen]
        idle = not self.running
        if idle:
            since = max(min(w.since for w in taken), job.last_finish)
            self.waits[job.job_id] = max(self.waits.get(job.job_id, 0.0), self.now - since)
        if self.serving != serve.job_id:
            self.serving, self.slice_start = serve.job_id, self.now
            job.last_served = self.now
        self.running += taken
        start = self.now
        for model_id in serve.evict:
            self.on_device.discard(model_id)
            self.dirty.discard(model_id)
        if serve.load is not None:
            start += job.load_s
            self.swaps += 1
            job.attained_s += job.load_s / job.weight
            self.on_device.add(serve.load)
        if idle:
            self.chunk_start = start
            self._start(start)

    def _park(self) -> None:
        job = self._job(self.serving)
        ran = self.now - self._running_since()
        self.running[0].remaining_s -= ran
        job.attained_s += ran / job.weight
        job.last_finish = self.now
        for work in self.running:
            work.since = self.now
        job.ready = sorted([*self.running, *job.ready], key=lambda w: (w.since, w.call_id))
        self.running = []
        self._finish += 1
        self.stretches.append(self.now - self.chunk_start)

    def _left_s(self) -> float:
        if not self.running:
            return 0.0
        ran = max(0.0, self.now - self._running_since())
        return sum(w.remaining_s for w in self.running) - ran

    def _running_since(self) -> float:
        ends = next(at for at, _, kind, what in self._queue if kind == "finish" and what == self._finish)
        return ends - self.running[0].remaining_s

    def _job(self, job_id: JobId | None) -> MachineJob:
        return next(job for job in self.jobs if job.job_id == job_id)

    def _push(self, at: float, kind: str, what: object) -> None:
        self._tick += 1
        heapq.heappush(self._queue, (at, self._tick, kind, what))
