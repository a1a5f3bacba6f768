"""A posterior over laws with one hump or two, what a look could tell of which it is, and the two beside Turnbull's.

Knows estimates and prices; knows nothing of agents.
"""

import functools
from dataclasses import dataclass

import numpy as np
from scipy import special

from plexrl.waiting.agents.estimates import Interval, SmoothedTurnbull, coverage
from plexrl.waiting.laws import FloatArray
from plexrl.waiting.schedules import Costs

_WIDTHS = (0.1, 0.2, 0.35, 0.6, 1.0)  # of a hump, in logarithms of time
_STEP = 1.0  # between neighbouring humps, in widths
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the one hump; the other has what is missing to 1
_ONE_HUMP = 0.5  # prior probability
_LEAST = 1e-9


@dataclass(frozen=True)
class _Humps:
    """Every hump that is considered: its place (logarithm of seconds) and width, float64 [humps]."""

    place: FloatArray
    width: FloatArray
    mass: FloatArray
    """float64 [humps, bins]"""
    log_prior: FloatArray
    """float64 [humps, humps], of a pair of them; on the diagonal is one hump alone."""

    def below(self, time_s: float) -> FloatArray:
        """float64 [humps]: probability of having finished by then."""
        with np.errstate(divide="ignore"):
            return np.asarray(special.ndtr((np.log(time_s) - self.place) / self.width), np.float64)


@functools.lru_cache(maxsize=16)
def _humps(edges_s: tuple[float, ...]) -> _Humps:
    """Even over logarithms of time between the first bins and the deadline, and over widths."""
    low, high = np.log(2 * edges_s[1]), np.log(edges_s[-1])
    places = [np.linspace(low, high, max(int((high - low) / (_STEP * width)), 2)) for width in _WIDTHS]
    place = np.concatenate(places)
    width = np.repeat(_WIDTHS, [some.size for some in places])
    prior = np.concatenate([np.full(some.size, 1 / some.size / len(places)) for some in places])
    pairs = prior[:, None] * prior
    np.fill_diagonal(pairs, 0.0)
    pairs = (1 - _ONE_HUMP) * pairs / pairs.sum() + np.diag(_ONE_HUMP * prior)
    with np.errstate(divide="ignore"):
        below = special.ndtr((np.log(edges_s) - place[:, None]) / width[:, None])
    return _Humps(place, width, np.diff(below, axis=1), np.log(pairs))


class LogNormalMixtures:
    """One lognormal or two in unknown shares, and a share that never finishes: the exact posterior over a grid."""

    NEVER_PRIOR = (1.0, 50.0)
    """Observations that the prior is worth: those that did not finish, and all."""

    def __init__(self, edges: FloatArray) -> None:
        self._humps = _humps(tuple(edges.tolist()))
        self._shares = np.array(_SHARES)[:, None, None]
        self._log_posterior = self._humps.log_prior - np.log(len(_SHARES)) + 0.0 * self._shares
        self._unfinished, self._count = self.NEVER_PRIOR

    def add(self, interval: Interval) -> None:
        self._count += 1
        if not np.isfinite(interval.by_s):
            self._unfinished += 1
            return
        one = np.maximum(self._humps.below(interval.by_s) - self._humps.below(interval.after_s), _LEAST)
        self._log_posterior += np.log(self._shares * one[:, None] + (1 - self._shares) * one)

    def mass(self) -> FloatArray:
        posterior = self._posterior()
        posterior /= posterior.sum()
        share = self._shares[:, :, 0]
        of_humps = (posterior.sum(axis=2) * share + posterior.sum(axis=1) * (1 - share)).sum(axis=0)
        return np.asarray(of_humps @ self._humps.mass * self._finishing, np.float64)

    def drawn(self, count: int) -> FloatArray:
        """float64 [count, bins]: so many laws, each as often as it is likely; the same ones if asked again."""
        below = np.cumsum(self._posterior().ravel())
        picks = np.random.default_rng(int(self._count)).random(count) * below[-1]
        at = np.minimum(np.searchsorted(below, picks, side="right"), below.size - 1)
        share, one, other = np.unravel_index(at, self._log_posterior.shape)
        part = self._shares[share, :, 0]
        mixed = part * self._humps.mass[one] + (1 - part) * self._humps.mass[other]
        return np.asarray(mixed * self._finishing, np.float64)

    @property
    def count(self) -> int:
        """Observations so far."""
        return int(self._count - self.NEVER_PRIOR[1])

    @property
    def _finishing(self) -> float:
        return 1 - self._unfinished / self._count

    def _posterior(self) -> FloatArray:
        """float64 [shares, humps, humps], not normalised."""
        return np.asarray(np.exp(self._log_posterior - self._log_posterior.max()), np.float64)


_LAWS_ASKED = 64
# Of a nat, in costs of a wait: it pays in many waits to come, but what is left to gain is the less the more is known.
_WORTH = 20.0
_WORTH_LATER = 200.0  # divided by the number of observations


def telling(
    edges: FloatArray,
    mass: FloatArray,
    guesses: LogNormalMixtures,
    looks: FloatArray,
    expected: float,
    costs: Costs,
    most: int,
) -> FloatArray:
    """The schedule, which costs `expected` under `mass`, with up to `most` looks more where they tell enough.

    What a look tells is the mutual information between what it will show and which law it is, over laws drawn from
    `guesses`. Its price, under `mass`, is a look in vain as often as it is one, less the delay that it saves.
    """
    worth = expected * min(_WORTH, _WORTH_LATER / max(guesses.count, 1))
    drawn = np.cumsum(guesses.drawn(_LAWS_ASKED), axis=1)
    drawn = np.concatenate((np.zeros((_LAWS_ASKED, 1)), drawn), axis=1)
    below = np.concatenate(([0.0], np.cumsum(mass)))
    at = np.arange(1, edges.size - 1)
    for _ in range(most):
        ends = np.unique(np.concatenate(([0], np.searchsorted(edges, looks), [edges.size - 1])))
        stretch = np.searchsorted(ends, at)
        before, after = ends[stretch - 1], ends[stretch]
        told = _information(drawn[:, at] - drawn[:, before]) + _information(drawn[:, after] - drawn[:, at])
        told -= _information(drawn[:, after] - drawn[:, before])
        saved = costs.delay * (edges[after] - edges[at]) * (below[at] - below[before])
        price = np.maximum(costs.query * (1 - below[at]) - saved, 0.0)
        gain = np.where(at == after, 0.0, worth * told - price)
        best = int(np.argmax(gain))
        if gain[best] <= 0:
            break
        looks = np.sort(np.append(looks, edges[at[best]]))
    return looks


def _information(probability: FloatArray) -> FloatArray:
    """Of an event that law i gives probability[i, j]: its part of the mutual information, float64 [j], nats."""
    probability = np.maximum(probability, 1e-12)
    return np.asarray((probability * np.log(probability / probability.mean(axis=0))).mean(axis=0), np.float64)


class EmpiricalEstimate:
    """Turnbull's estimate beside the mixtures: each counts by how well it foretold the observations, one by one.

    Where laws have one hump or two, the mixtures need fewer observations; where they do not, they foretell badly and
    soon count for nothing. Where to look out of curiosity is always theirs to say: they alone know what they do not.
    """

    def __init__(self, edges: FloatArray) -> None:
        self._edges = edges
        self._guesses = LogNormalMixtures(edges)
        self._parts = (SmoothedTurnbull(edges), self._guesses)
        self._masses = [part.mass() for part in self._parts]
        self._scores = np.zeros(len(self._parts))

    def add(self, interval: Interval) -> None:
        seen = coverage(self._edges, interval)
        for number, mass in enumerate(self._masses):
            foretold = float(seen @ np.append(mass, max(1 - float(mass.sum()), 0.0)))
            self._scores[number] += np.log(max(foretold, _LEAST))
        for part in self._parts:
            part.add(interval)
        self._masses = [part.mass() for part in self._parts]

    def mass(self) -> FloatArray:
        weights = np.exp(self._scores - self._scores.max())
        return np.asarray(weights @ np.stack(self._masses) / weights.sum(), np.float64)

    def probed(self, looks: FloatArray, expected: float, costs: Costs, most: int) -> FloatArray:
        """The schedule, which costs `expected`, with up to `most` looks more, where they tell enough."""
        return telling(self._edges, self.mass(), self._guesses, looks, expected, costs, most)
