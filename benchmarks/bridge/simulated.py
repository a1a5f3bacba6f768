"""The benchmark's jobs in the simulator: one group, the live policy, hours of waiting in a second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from benchmarks.bridge.hints import Say
from benchmarks.bridge.trace import JobTrace, Trace
from benchmarks.bridge.workload import Script
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.simulation.engine import Process, Simulation
from plexrl_controller.simulation.live_policy import Decisions, LivePolicy
from plexrl_controller.simulation.pools import (
    GENERATE,
    TRAIN,
    Call,
    Keep,
    Mode,
    Resident,
    Run,
    SharedGroup,
    State,
    Totals,
)

_STATE_BYTES = 1000.0


@dataclass(frozen=True)
class Costs:
    """Seconds of a thought, a training step, and a move of a state onto the device and off it."""

    think_s: float
    train_s: float
    load_s: float
    store_s: float

    @property
    def round_trip_s(self) -> float:
        """Of a swap."""
        return self.load_s + self.store_s


@dataclass(frozen=True)
class Simulated:
    """A run, and what bounds its losses."""

    trace: Trace
    calls: int
    longest_setup_s: float


class _Observed(LivePolicy):
    """The live policy, with notes of whom it serves and what that cost."""

    def __init__(self, policy: Policy, jobs: Sequence[JobTrace]) -> None:
        super().__init__(policy, Decisions())
        self._traces = jobs
        self.calls = 0
        self.longest_setup_s = 0.0

    def decide(self, group: SharedGroup, now: float) -> Run | Keep | None:
        decision = super().decide(group, now)
        if isinstance(decision, Run):
            self.calls += 1
            self.longest_setup_s = max(self.longest_setup_s, decision.setup_s)
            if decision.setup_s > 0.0:
                self._traces[decision.resident.job].loads.append((now, now + decision.setup_s))
        return decision

    def ran(self, group: SharedGroup, call: Call, seconds: float, done: bool) -> None:
        super().ran(group, call, seconds, done)
        now = group.simulation.now
        self._traces[call.resident.job].busy.append((now - seconds, now))


def simulate(
    jobs: Sequence[Sequence[Sequence[Script]]],
    costs: Costs,
    say: Callable[[int], Say],
    *,
    policy: Policy | None = None,
    device_states: int = 2,
) -> Simulated:
    """Runs jobs, each a sequence of rounds, each a script per rollout. `say`: what a job says of its sleeps, by number.

    `device_states`: how many jobs' states the device holds at once.
    """
    simulation, totals = Simulation(), Totals([], [])
    traces = [JobTrace() for _ in jobs]
    observed = _Observed(policy or Policy(), traces)
    group = SharedGroup(simulation, totals, "device", 1, observed, device_states * _STATE_BYTES)
    for index, rounds in enumerate(jobs):
        state = State(f"job{index}/model", _STATE_BYTES, costs.load_s)
        state.store_s = costs.store_s
        resident = group.join(index, f"job{index}", state, None)
        resident.train = state
        simulation.start(_job(simulation, resident, rounds, costs, say(index), traces[index]))
    simulation.run()
    total_s = max((end for trace in traces for _, end in trace.busy), default=0.0)
    group.close()
    trace = Trace(
        jobs={f"job{index}": trace for index, trace in enumerate(traces)},
        total_s=total_s,
        swaps=totals.swaps,
        swap_s=group.spent_s[Mode.SWAP],
        hold_s=group.spent_s[Mode.HOLD],
    )
    return Simulated(trace, observed.calls, observed.longest_setup_s)


def bound_s(run: Simulated, policy: Policy) -> float:
    """The most device time that swaps and holds can take, whatever jobs say: per call one round trip, and one hold.

    A hold ends after half a round trip over `trust`. The scheduler's round trip is twice the mean of what changes of
    residency took, so at most twice the longest.
    """
    return run.calls * run.longest_setup_s * (2.0 + 1.0 / policy.trust)


def _job(
    simulation: Simulation,
    resident: Resident,
    rounds: Sequence[Sequence[Script]],
    costs: Costs,
    say: Say,
    trace: JobTrace,
) -> Process:
    """Idle until the first rollout wakes: the hint is given as the job falls idle and not revised before its end."""
    for scripts in rounds:
        wakes = [(simulation.now, rollout, 0) for rollout in range(len(scripts))]
        heapify(wakes)
        while wakes:
            at, rollout, thought = wakes[0]
            if at > simulation.now:
                begin = simulation.now
                yield resident.stall(at - begin, say(at - begin))
                trace.idle.append((begin, simulation.now))
            heappop(wakes)
            if thought == len(scripts[rollout]):
                continue
            if trace.idle and trace.idle[-1][1] == simulation.now:
                trace.wakes.append(simulation.now)
            yield resident.run(GENERATE, costs.think_s, mid_phase=True)
            heappush(wakes, (simulation.now + scripts[rollout][thought], rollout, thought + 1))
        yield resident.run(TRAIN, costs.train_s, ends_iteration=True)
