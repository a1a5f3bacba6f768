"""A job's idle hint follows the sleeps of its rollouts."""

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.waiting.bridge import LEAST_S, IdleBridge, Paced, Rollout
from plexrl.waiting.episodes import light_world
from plexrl.waiting.scenarios import SCENARIOS


@dataclass
class Job:
    """Stands for the job: what it was told, by a clock that the test moves."""

    now: float = 0.0
    until: float = float("-inf")
    told: int = 0
    bridge: IdleBridge = field(init=False)

    def __post_init__(self) -> None:
        self.bridge = IdleBridge(self._idle, clock=lambda: self.now)

    def _idle(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.until, self.told = self.now + seconds, self.told + 1


# Times: a script per rollout of (work, sleep planned, share of it that is really slept).
times = st.floats(0.0, 100.0)
scripts = st.lists(
    st.lists(st.tuples(times, times, st.floats(0.0, 1.0)), min_size=1, max_size=4), min_size=1, max_size=4
)


@given(scripts)
@settings(max_examples=50, deadline=None)
def test_what_the_scheduler_last_heard_is_the_least_wake_time_of_all_rollouts(
    scripts_: list[list[tuple[float, float, float]]],
) -> None:
    """At any moment: None awake, told the soonest planned wake; somebody awake, no statement about the future."""
    job = Job()
    events: list[tuple[float, int, str, float]] = []
    for index, script in enumerate(scripts_):
        at = 0.0
        for work, sleep, share in script:
            at += work
            events.append((at, index, "sleep", sleep))
            at += sleep * share
            events.append((at, index, "wake", 0.0))
        events.append((at, index, "end", 0.0))
    lives = [job.bridge.rollout() for _ in scripts_]
    rollouts = [life.__enter__() for life in lives]
    asleep = {}
    wakes: dict[int, float | None] = dict.fromkeys(range(len(scripts_)))
    for at, index, what, sleep in sorted(events, key=lambda event: event[0]):
        job.now = at
        match what:
            case "sleep":
                asleep[index] = rollouts[index].sleeping(sleep)
                asleep[index].__enter__()
                wakes[index] = at + sleep
            case "wake":
                asleep[index].__exit__(None, None, None)
                wakes[index] = None
            case _:
                lives[index].__exit__(None, None, None)
                del wakes[index]
        planned = [until for until in wakes.values() if until is not None]
        idle_until = min(planned) if planned and len(planned) == len(wakes) else at
        assert max(job.until, at) == pytest.approx(max(idle_until, at), abs=LEAST_S)


def test_a_sleep_that_ends_as_told_needs_no_second_message() -> None:
    job = Job()
    with job.bridge.rollout() as rollout:
        with rollout.sleeping(10.0):
            job.now = 10.0
        with rollout.sleeping(0.001):
            pass
    assert job.told == 1


def test_a_sleep_that_is_cut_short_is_withdrawn() -> None:
    job = Job()

    def interrupted(rollout: Rollout) -> None:
        with rollout.sleeping(10.0):
            job.now = 1.0
            raise KeyboardInterrupt

    with job.bridge.rollout() as rollout:
        with pytest.raises(KeyboardInterrupt):
            interrupted(rollout)
        assert job.until == 1.0


def test_a_rollout_that_ends_no_longer_keeps_the_job_busy() -> None:
    job = Job()
    busy = job.bridge.rollout()
    busy.__enter__()
    with job.bridge.rollout() as sleeper, sleeper.sleeping(30.0):
        assert job.told == 0
        busy.__exit__(None, None, None)
        assert job.until == 30.0
        with job.bridge.rollout():
            assert job.until == 0.0, "a new rollout works: what was told is withdrawn"


def test_rollouts_may_live_in_threads() -> None:
    told: list[float] = []
    bridge = IdleBridge(told.append)
    barrier = threading.Barrier(8)

    def live() -> None:
        with bridge.rollout() as rollout:
            barrier.wait()
            for _ in range(50):
                rollout.sleep(0.0)

    threads = [threading.Thread(target=live) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seconds < LEAST_S for seconds in told)


def test_a_paced_world_tells_of_sleeps_and_not_of_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes ten times as fast as in the world, for both; only the sleep was announced."""
    job = Job()

    def pass_time(seconds: float) -> None:
        job.now += seconds

    monkeypatch.setattr("plexrl.waiting.bridge.time.sleep", pass_time)
    with job.bridge.rollout() as rollout:
        world = Paced(light_world(SCENARIOS["gamma-16"], 0, 0), rollout, speed=10.0)
        world.tools.call("apply", ("deployment", "web"), {})
        world.advance_to(5.0)
        assert (job.now, job.until, world.now_s) == (0.5, 0.5, 5.0)
        assert world.tools.call("wait", ("deployment", "web", 1000.0), {}) is True
        assert job.now == pytest.approx(world.now_s / 10.0)
        assert world.held_s == pytest.approx(world.now_s - 5.0)
        assert job.told == 1
        assert [look.ready for look in world.looks] == [True]
        assert world.took_s("apply", "deployment", "web") == pytest.approx(world.now_s)
    with pytest.raises(ValueError, match="speed"):
        Paced(light_world(SCENARIOS["gamma-16"], 0, 0), rollout, speed=0.0)
