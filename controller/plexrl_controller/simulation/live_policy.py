"""The policy of the live controller on a simulated group: the same `next_slice`, views, estimates and accounts.

This module only builds views and carries out plans; it decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import thread_time

from plexrl_controller.domain.ids import CallId, JobId, ModelId, Tenant, WorkerId
from plexrl_controller.domain.states import CallKind
from plexrl_controller.scheduling.estimates import Estimates
from plexrl_controller.scheduling.fairness import Accounts, Quota
from plexrl_controller.scheduling.invariants import violations
from plexrl_controller.scheduling.next_slice import next_slice
from plexrl_controller.scheduling.plan import Hold, Plan, Prefetch, Serve, WriteBack, Yield
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.scheduling.views import GroupView, JobView, ModelView, ReadyCall
from plexrl_controller.simulation.pools import Call, Keep, Mode, Resident, Run, SharedGroup, State

NO_TENANTS: Mapping[int, Tenant] = {}
NO_QUOTAS: Mapping[Tenant, Quota] = {}


@dataclass(slots=True)
class Decisions:
    """What the decisions of a run cost, and whether they were sound."""

    every: int = 1
    """One decision in so many is timed and checked against the invariants; 0: none."""
    seconds: list[float] = field(default_factory=list)
    """Processor time of view, decision and check, one entry per decision: what others do on the machine does not count.
    Never part of a result that seeds reproduce."""
    count: int = 0


class LivePolicy:
    """Runs one group by `next_slice`."""

    def __init__(
        self,
        policy: Policy,
        decisions: Decisions,
        *,
        clean_eviction: bool = True,
        learn: bool = True,
        tenants: Mapping[int, Tenant] = NO_TENANTS,
        quotas: Mapping[Tenant, Quota] = NO_QUOTAS,
    ) -> None:
        """`clean_eviction`: copies that equal the host tier's are dropped without writing them. `tenants`: of jobs by
        their index, with the device seconds that they may use."""
        self._policy = policy
        self._decisions = decisions
        self._clean_eviction = clean_eviction
        self._learn = learn
        self._estimates = Estimates()
        self._tenants = tenants
        self._accounts = Accounts(quotas)
        self._jobs: dict[int, JobView] = {}
        self._residents: dict[JobId, Resident] = {}
        self._states: dict[str, State] = {}
        self._total_bytes = 0
        self._expected: dict[tuple[int, CallKind], float | None] = {}
        self._stalls: dict[tuple[int, CallKind], float | None] = {}
        self._hint_factors: dict[int, float] = {}

    def decide(self, group: SharedGroup, now: float) -> Run | Keep | None:
        """Asks `next_slice` for a free group."""
        plan = self._plan(group, now, None)
        action = plan.action
        if isinstance(action, Serve):
            resident = self._residents[action.job_id]
            setup_s = self._swap(group, action, now)
            if setup_s > 0.0:
                self._accounts.charge(action.job_id, setup_s, now)
                self._estimates.swap(action.job_id, setup_s)
            self._move(group, plan, now + setup_s)
            return Run(resident, setup_s)
        self._move(group, plan, now)
        return Keep(action.until) if isinstance(action, Hold) else None

    def interrupt(self, group: SharedGroup, now: float) -> float | None:
        """Asks `next_slice` while a call runs."""
        running = group.running
        assert running is not None
        running.resident.changed = True
        plan = self._plan(group, now, running)
        self._move(group, plan, now)
        return now if isinstance(plan.action, Yield) else plan.again_at

    def arrived(self, group: SharedGroup, call: Call) -> None:
        """Learns the stall before the call."""
        resident = call.resident
        if resident.job not in self._jobs:
            self._join(group, resident)
        elif self._learn and resident.last_finish > 0.0:
            stall_s = call.ready_since - resident.last_finish
            if stall_s > 0.0:
                hint_s = resident.hint_s if resident.stalled_at == resident.last_finish else None
                self._estimates.stall(JobId(resident.name), resident.last_kind, stall_s, hint_s)

    def ran(self, group: SharedGroup, call: Call, seconds: float, done: bool) -> None:
        """Charges the time, and learns the service of a finished call."""
        resident = call.resident
        job_id = JobId(resident.name)
        self._accounts.charge(job_id, seconds, group.simulation.now)
        if not done or not self._learn:
            return
        self._estimates.service(job_id, call.kind, call.service_s)
        if call.ends_iteration or resident.train is None:
            self._estimates.iteration(job_id)
            for kind in (CallKind.GENERATE, CallKind.FORWARD_BACKWARD):
                self._expected[resident.job, kind] = self._estimates.expected_s(job_id, kind)
                self._stalls[resident.job, kind] = self._estimates.expected_stall_s(job_id, kind)
            self._hint_factors[resident.job] = self._estimates.hint_factor(job_id)

    def left(self, group: SharedGroup, resident: Resident) -> None:
        """Forgets the job."""
        job_id = JobId(resident.name)
        if self._jobs.pop(resident.job, None) is None:
            return
        self._estimates.forget(job_id)
        self._accounts.leave(job_id)
        del self._residents[job_id]
        self._hint_factors.pop(resident.job, None)
        for state in resident.states:
            del self._states[state.model_id]
            self._total_bytes -= state.bytes

    def _join(self, group: SharedGroup, resident: Resident) -> None:
        job_id = JobId(resident.name)
        self._accounts.join(job_id, self._tenants.get(resident.job))
        self._residents[job_id] = resident
        for state in resident.states:
            self._states[state.model_id] = state
            self._total_bytes += state.bytes
        self._jobs[resident.job] = self._job_view(group, resident, None, group.simulation.now)

    def _plan(self, group: SharedGroup, now: float, running: Call | None) -> Plan:
        decisions = self._decisions
        decisions.count += 1
        if not decisions.every or decisions.count % decisions.every:
            return next_slice(self._view(group, now, running), now, self._policy)
        began = thread_time()
        view = self._view(group, now, running)
        plan = next_slice(view, now, self._policy)
        if broken := violations(view, plan):
            raise AssertionError(f"a plan breaks {broken}: {plan} in {view}")
        decisions.seconds.append(thread_time() - began)
        return plan

    def _view(self, group: SharedGroup, now: float, running: Call | None) -> GroupView:
        jobs = self._jobs
        for resident in group.residents:
            # A quota is a tenant's: its jobs change with each other.
            if (resident.changed or self._tenants) and resident.job in jobs:
                jobs[resident.job] = self._job_view(group, resident, running, now)
                # What runs now is charged up to this moment: the view is stale at the next one.
                resident.changed = running is not None and running.resident is resident
        return GroupView(
            worker_id=WorkerId(group.name),
            available=True,
            device_state_bytes=int(min(group.device_state_bytes, 1e18)),
            jobs=tuple(jobs.values()),
            serving=JobId(group.serving.name) if group.serving is not None else None,
            slice_start=group.slice_start,
            world_size=group.gpus,
            can_yield=True,
            chunk_start=group.run_start,
            background_moves=self._total_bytes > group.device_state_bytes,
        )

    def _job_view(self, group: SharedGroup, resident: Resident, running: Call | None, now: float) -> JobView:
        job_id, call = JobId(resident.name), resident.call
        runs = running is not None and call is running
        factor = self._hint_factors.get(resident.job, 1.0)
        hint_s = resident.hint_s if call is None and resident.stalled_at == resident.last_finish else None
        attained_s = self._accounts.attained_s(job_id)
        return JobView(
            job_id=job_id,
            models=tuple([self._model_view(state, resident, call, runs) for state in resident.states]),
            in_flight=1 if runs else 0,
            in_flight_left_s=self._left_s(resident, running, now - group.run_start) if runs else None,
            idle_until=resident.stalled_at + hint_s * factor if hint_s is not None else None,
            mid_phase=resident.mid_phase,
            mid_iteration=resident.mid_iteration,
            last_finish=resident.last_finish,
            round_trip_s=self._round_trip_s(group, resident),
            expected_stall_s=self._stalls.get((resident.job, resident.last_kind)),
            attained_s=attained_s + (now - group.run_start if runs and group.mode is Mode.BUSY else 0.0),
            over_quota=self._accounts.over_quota(job_id, now) if self._tenants else False,
            last_served=resident.last_served,
        )

    def _model_view(self, state: State, resident: Resident, call: Call | None, runs: bool) -> ModelView:
        ready: tuple[ReadyCall, ...] = ()
        mine = call is not None and resident.state_for(call) is state
        if mine and not runs:
            assert call is not None
            model_id, left_s = ModelId(state.model_id), self._left_s(resident, call, 0.0)
            ready = (ReadyCall(CallId(state.model_id), model_id, call.kind, call.ready_since, expected_s=left_s),)
        return ModelView(
            model_id=ModelId(state.model_id),
            state_bytes=state.bytes,
            on_device=state.on_device,
            last_used=state.last_used,
            ready=ready,
            dirty_bytes=state.bytes if state.dirty else 0,
            changing=mine and runs and state is resident.train,
            moving=state.arrives_at is not None or state.writing,
            load_s=state.load_s,
        )

    def _left_s(self, resident: Resident, call: Call | None, running_s: float) -> float | None:
        """Estimated work that remains of a call; None while nothing is known."""
        expected_s = self._expected.get((resident.job, call.kind)) if call is not None else None
        if expected_s is None or call is None:
            return None
        return max(0.0, expected_s - (call.service_s - call.remaining_s) - running_s)

    def _round_trip_s(self, group: SharedGroup, resident: Resident) -> float:
        """Two moves where the states do not fit together; nothing otherwise."""
        if self._total_bytes <= group.device_state_bytes:
            return 0.0
        learned = self._estimates.round_trip_s(JobId(resident.name)) if self._learn else None
        return learned if learned is not None else 2.0 * resident.states[-1].load_s

    def _swap(self, group: SharedGroup, action: Serve, now: float) -> float:
        """Carries out the residency changes of a slice; returns their seconds on the critical path."""
        seconds = 0.0
        served = self._states[action.calls[0].model_id]
        if served.prefetched:
            group.totals.prefetch_hits += 1
            served.prefetched = False
        for model_id in action.evict:
            state = self._states[model_id]
            seconds += state.store_s if state.dirty or not self._clean_eviction else 0.0
            self._drop(state)
        if action.load is not None:
            state = self._states[action.load]
            if state.arrives_at is not None:
                # The rest of a prefetch; what it has brought so far was hidden.
                seconds += max(0.0, state.arrives_at - now)
                state.arrives_at = None
            else:
                seconds += state.load_s
            state.on_device = True
        if action.load is not None or action.evict:
            self._touch()
        return seconds

    def _move(self, group: SharedGroup, plan: Plan, start: float) -> None:
        """Begins background moves."""
        for move in plan.background:
            match move:
                case Prefetch(model_id=model_id, drop=drop):
                    for dropped in drop:
                        self._drop(self._states[dropped])
                    state = self._states[model_id]
                    state.arrives_at = start + state.load_s
                    state.prefetched = True
                    group.simulation.at(state.arrives_at, self._arrived, (group, state))
                case WriteBack(model_id=model_id):
                    state = self._states[model_id]
                    state.writing = True
                    group.simulation.at(start + state.store_s, self._written, (group, state, state.last_used))
            self._touch()

    def _arrived(self, what: tuple[SharedGroup, State]) -> None:
        group, state = what
        if state.arrives_at is not None and state.arrives_at <= group.simulation.now + 1e-9:
            state.arrives_at = None
            state.on_device = True
            self._touch()
            group.moved()

    def _written(self, what: tuple[SharedGroup, State, float]) -> None:
        group, state, last_used = what
        state.writing = False
        if state.last_used == last_used and state.on_device:
            state.dirty = False
        self._touch()
        if state.model_id in self._states:
            group.moved()

    def _drop(self, state: State) -> None:
        state.on_device = False
        state.dirty = state.prefetched = False
        state.arrives_at = None

    def _touch(self) -> None:
        for resident in self._residents.values():
            resident.changed = True
