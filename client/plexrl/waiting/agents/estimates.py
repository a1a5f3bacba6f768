"""Estimates of how long an operation takes, from intervals in which it finished.

An estimate is a histogram over bins of time that plans can be made on. Knows nothing of agents and costs.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import special

from plexrl.waiting.laws import FloatArray

BINS = 160
LEAST_PART = 1e-3  # of the deadline: the end of the first bin


@dataclass(frozen=True)
class Interval:
    """after < T <= by, in seconds; by is inf for what had not finished at the deadline."""

    after_s: float
    by_s: float


def grid(deadline_s: float) -> FloatArray:
    """float64 [BINS + 1]: 0, then logarithmic up to the deadline."""
    return np.concatenate(([0.0], np.geomspace(LEAST_PART * deadline_s, deadline_s, BINS)))


class Estimate(Protocol):
    """Of one operation."""

    def add(self, interval: Interval) -> None:
        """Takes an observation into account."""
        ...

    def mass(self) -> FloatArray:
        """float64 [bins]: probability of (edges[i], edges[i + 1]]; what is missing to 1 is not over by the deadline."""
        ...


class SmoothedTurnbull:
    """No family assumed: Turnbull's estimate for interval-censored times, smoothed between steps of EM.

    EM alone puts all probability on a few points; a little smoothing after each step (EMS, Silverman et al. 1990) gives
    a density to plan on. How much smoothing is right depends on the law, so several bandwidths run side by side and
    count by how well each foretold the observations, one by one (Dawid's prequential principle). Before the first, and
    always with a small weight, every order of magnitude is as likely as any other.
    """

    BANDWIDTHS = (0.12, 0.3, 0.6, 1.0)
    PRIOR_WEIGHT = 0.4
    STEPS = 12

    def __init__(self, edges: FloatArray) -> None:
        self._edges = edges
        self._prior = np.full(edges.size, 1.0 / edges.size)  # the last entry: not before the deadline
        self._cover = np.zeros((0, edges.size))
        self._masses = [self._prior for _ in self.BANDWIDTHS]
        self._scores = np.zeros(len(self.BANDWIDTHS))

    def add(self, interval: Interval) -> None:
        seen = coverage(self._edges, interval)
        self._scores += [np.log(max(float(seen @ self._with_prior(mass)), 1e-9)) for mass in self._masses]
        self._cover = np.vstack((self._cover, seen))
        count = self._cover.shape[0]
        self._masses = [
            self._refined(0.9 * mass + 0.1 * self._prior, bandwidth * count**-0.2)
            for mass, bandwidth in zip(self._masses, self.BANDWIDTHS, strict=True)
        ]

    def mass(self) -> FloatArray:
        weights = np.exp(self._scores - self._scores.max())
        weights /= weights.sum()
        mixed = sum(weight * mass for weight, mass in zip(weights, self._masses, strict=True))
        return self._with_prior(np.asarray(mixed, np.float64))[:-1]

    def _with_prior(self, mass: FloatArray) -> FloatArray:
        weight = self.PRIOR_WEIGHT / (self.PRIOR_WEIGHT + self._cover.shape[0])
        return (1 - weight) * mass + weight * self._prior

    def _refined(self, mass: FloatArray, bandwidth: float) -> FloatArray:
        kernel = _kernel(bandwidth * _deviation(mass))
        for _ in range(self.STEPS):
            mass = mass * (self._cover / np.maximum(self._cover @ mass, 1e-300)[:, None]).mean(axis=0)
            mass = _smoothed(mass, kernel)
        return mass


def coverage(edges: FloatArray, interval: Interval) -> FloatArray:
    """float64 [bins + 1]: the part of each bin that lies in the interval; last: past the deadline."""
    inside = np.clip(np.minimum(interval.by_s, edges[1:]) - np.maximum(interval.after_s, edges[:-1]), 0, None)
    return np.append(inside / np.diff(edges), float(interval.by_s > edges[-1]))


def _deviation(mass: FloatArray) -> float:
    """Standard deviation of what finishes, in bins."""
    finite = mass[:-1]
    total = max(float(finite.sum()), 1e-12)
    at = np.arange(finite.size)
    mean = float(at @ finite) / total
    return float(np.sqrt(float((at - mean) ** 2 @ finite) / total))


def _kernel(bandwidth: float) -> FloatArray:
    """Gaussian weights, odd in number; a single 1 when narrower than a third of a bin."""
    reach = int(4 * bandwidth) + 1 if bandwidth >= 1 / 3 else 0
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(bandwidth, 1e-9)) ** 2)
    return np.asarray(weights / weights.sum(), np.float64)


def _smoothed(mass: FloatArray, kernel: FloatArray) -> FloatArray:
    """Smoothing over bins; what would leave at either end stays there, and so does what never finishes."""
    reach = kernel.size // 2
    spread = np.convolve(mass[:-1], kernel)
    smooth = spread[reach : spread.size - reach].copy()
    smooth[0] += spread[:reach].sum()
    smooth[-1] += spread[spread.size - reach :].sum()
    return np.append(smooth, mass[-1])


class BayesianGamma:
    """Assumes a Gamma law, and a share that never finishes; posterior over a grid of shapes and means."""

    NEVER_PRIOR = (1.0, 50.0)
    """Observations that the prior is worth: those that did not finish, and all."""

    def __init__(self, edges: FloatArray) -> None:
        shape, mean_s = np.meshgrid(
            np.geomspace(0.5, 100, 18), np.geomspace(2 * edges[1], edges[-1], 70), indexing="ij"
        )
        scale_s = (mean_s / shape).ravel()[:, None]
        self._shape, self._scale_s = shape.ravel(), scale_s.ravel()
        self._cdf = np.asarray(special.gammainc(self._shape[:, None], edges / scale_s), np.float64)
        self._log_posterior = np.zeros(self._shape.size)
        self._unfinished, self._count = self.NEVER_PRIOR

    def add(self, interval: Interval) -> None:
        self._count += 1
        if not np.isfinite(interval.by_s):
            self._unfinished += 1
            return
        likelihood = special.gammainc(self._shape, interval.by_s / self._scale_s) - special.gammainc(
            self._shape, interval.after_s / self._scale_s
        )
        self._log_posterior += np.log(np.maximum(likelihood, 1e-12))

    def mass(self) -> FloatArray:
        posterior = np.exp(self._log_posterior - self._log_posterior.max())
        posterior /= posterior.sum()
        return np.asarray(np.diff(posterior @ self._cdf) * (1 - self._unfinished / self._count), np.float64)
