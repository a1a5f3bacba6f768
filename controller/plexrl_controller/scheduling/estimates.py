"""What is learned of each job while it runs: quantiles of service, stalls and swaps, and how far off its hints are.

Bounded memory, no clock: callers say what they measured. Old measurements fade: responses get longer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, log

from plexrl_controller.domain.ids import JobId
from plexrl_controller.domain.states import CallKind
from plexrl_controller.scheduling.views import Demand


class Sketch:
    """Quantiles of positive numbers to a relative error of 5 %, as in DDSketch (Masson et al. 2019).

    Counts fade. Numbers fall into logarithmic buckets between 1e-4 and 1e6, so that a sketch holds at most 231 counts.
    """

    _GAMMA = log(1.1)
    _LOWEST, _HIGHEST = round(log(1e-4) / _GAMMA), round(log(1e6) / _GAMMA)

    def __init__(self, memory: float = 64.0) -> None:
        """`memory`: measurements after which one counts for 1/e of a new one."""
        self._growth = exp(1.0 / memory)
        self._counts: dict[int, float] = {}
        self._unit = 1.0
        self._total = 0.0
        self._sum = 0.0
        self._squares = 0.0
        self.observations = 0
        self._median: float | None = None
        self._median_at = 0

    def add(self, value: float) -> None:
        """One measurement; negative ones count as 0."""
        value = max(0.0, value)
        bucket = self._LOWEST if value <= 1e-4 else min(self._HIGHEST, round(log(value) / self._GAMMA))
        self._unit *= self._growth
        self._counts[bucket] = self._counts.get(bucket, 0.0) + self._unit
        self._total += self._unit
        self._sum += self._unit * value
        self._squares += self._unit * value * value
        self.observations += 1
        if self._unit > 1e12:
            self._rescale()

    def quantile(self, share: float) -> float | None:
        """The value below which `share` of the measurements lie; None before the first."""
        if not self._total:
            return None
        below = 0.0
        for value, weight in self.items():
            below += weight
            if below >= share * (1.0 - 1e-9):
                return value
        return value

    @property
    def median(self) -> float | None:
        """The quantile one half, computed anew when an eighth more has been measured: views ask at every event."""
        if self.observations - self._median_at > self.observations // 8 or self._median is None:
            self._median, self._median_at = self.quantile(0.5), self.observations
        return self._median

    @property
    def mean(self) -> float | None:
        """Exact mean of the fading measurements; None before the first."""
        return self._sum / self._total if self._total else None

    @property
    def variation(self) -> float | None:
        """Squared coefficient of variation; None before the second measurement."""
        if self.observations < 2 or not self._sum:
            return None
        mean = self._sum / self._total
        return max(0.0, self._squares / self._total / (mean * mean) - 1.0)

    def items(self) -> Iterator[tuple[float, float]]:
        """Bucket values, ascending, with their share of the measurements."""
        for bucket in sorted(self._counts):
            yield (0.0 if bucket == self._LOWEST else exp(bucket * self._GAMMA)), self._counts[bucket] / self._total

    def _rescale(self) -> None:
        scale, self._unit = self._unit, 1.0
        self._counts = {b: c / scale for b, c in self._counts.items() if c / scale > 1e-6}
        self._total, self._sum, self._squares = (x / scale for x in (self._total, self._sum, self._squares))


@dataclass(slots=True)
class JobEstimates:
    """One job's sketches on one group."""

    service: dict[CallKind, Sketch] = field(default_factory=dict)
    stall: dict[CallKind, Sketch] = field(default_factory=dict)
    swap: Sketch = field(default_factory=lambda: Sketch(memory=16.0))
    busy: Sketch = field(default_factory=Sketch)
    iteration: Sketch = field(default_factory=Sketch)
    visits: Sketch = field(default_factory=Sketch)
    hint_log: float = 0.0
    hints: int = 0
    _busy_s: float = 0.0
    _own_s: float = 0.0
    _visits: float = 0.0


class Estimates:
    """Estimates of all jobs of one group."""

    MIN_OBSERVATIONS = 3
    """Before that, an estimate is None: nothing is known."""
    HINT_WEIGHT = 0.2
    HINT_RANGE = (0.125, 8.0)

    def __init__(self) -> None:
        self._jobs: dict[JobId, JobEstimates] = {}

    def forget(self, job_id: JobId) -> None:
        """Drops a job that has ended."""
        self._jobs.pop(job_id, None)

    def service(self, job_id: JobId, kind: CallKind, seconds: float) -> None:
        """A call ran for so long, swaps not included."""
        job = self._job(job_id)
        if kind not in job.service:
            job.service[kind] = Sketch()
        job.service[kind].add(seconds)
        job._busy_s += seconds
        job._own_s += seconds

    def stall(self, job_id: JobId, after: CallKind, seconds: float, hinted_s: float | None = None) -> None:
        """After a call of kind `after` the job had nothing to run for so long; `hinted_s` is what it had said."""
        job = self._job(job_id)
        if after not in job.stall:
            job.stall[after] = Sketch()
        job.stall[after].add(seconds)
        job._own_s += seconds
        job._visits += 1
        if hinted_s is not None and hinted_s > 0.0:
            low, high = self.HINT_RANGE
            sample = log(min(high, max(low, seconds / hinted_s)))
            job.hints += 1
            job.hint_log += max(self.HINT_WEIGHT, 1.0 / job.hints) * (sample - job.hint_log)

    def swap(self, job_id: JobId, seconds: float) -> None:
        """One residency change of the job took so long."""
        self._job(job_id).swap.add(seconds)

    def iteration(self, job_id: JobId) -> None:
        """An iteration of the job ended: what was measured since the last one was one iteration."""
        job = self._job(job_id)
        if job._own_s > 0.0:
            job.busy.add(job._busy_s)
            job.iteration.add(job._own_s)
            job.visits.add(max(1.0, job._visits))
        job._busy_s = job._own_s = job._visits = 0.0

    def expected_s(self, job_id: JobId, kind: CallKind) -> float | None:
        """Median service of a call; None while unknown."""
        return self._median(self._jobs.get(job_id, _NOTHING).service.get(kind))

    def expected_stall_s(self, job_id: JobId, after: CallKind) -> float | None:
        """Median stall after a call; None while unknown."""
        return self._median(self._jobs.get(job_id, _NOTHING).stall.get(after))

    def round_trip_s(self, job_id: JobId) -> float | None:
        """Two swaps in the mean; None before the first."""
        mean = self._jobs.get(job_id, _NOTHING).swap.mean
        return 2.0 * mean if mean is not None else None

    def hint_factor(self, job_id: JobId) -> float:
        """What the job's hints must be multiplied with: 1 until something is known."""
        return exp(self._jobs.get(job_id, _NOTHING).hint_log)

    def demand(self, job_id: JobId) -> Demand | None:
        """The job's demand as placement needs it; None before MIN_OBSERVATIONS iterations."""
        job = self._jobs.get(job_id, _NOTHING)
        iteration_s, busy_s, visits = job.iteration.mean, job.busy.mean, job.visits.mean
        if job.iteration.observations < self.MIN_OBSERVATIONS or not iteration_s or busy_s is None or visits is None:
            return None
        # Of a sum of independent visits the variation is that of one, divided by their number.
        variation = visits * max(job.busy.variation or 0.0, job.iteration.variation or 0.0)
        return Demand(iteration_s, busy_s, visits, min(1.0, variation), round_trip_s=self.round_trip_s(job_id) or 0.0)

    def _median(self, sketch: Sketch | None) -> float | None:
        return sketch.median if sketch is not None and sketch.observations >= self.MIN_OBSERVATIONS else None

    def _job(self, job_id: JobId) -> JobEstimates:
        if job_id not in self._jobs:
            self._jobs[job_id] = JobEstimates()
        return self._jobs[job_id]


_NOTHING = JobEstimates()
