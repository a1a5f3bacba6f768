"""How long an operation takes: probability laws of latencies, and named ones grounded in public measurements.

Knows probability; knows nothing of clusters, agents or costs. Chance comes in as a numpy Generator.

Times are in seconds, t >= 0. A law's functions take a number or an array and return a float64 array of the same shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from scipy import special

FloatArray: TypeAlias = npt.NDArray[np.float64]
Times: TypeAlias = float | Sequence[float] | FloatArray


@runtime_checkable
class Law(Protocol):
    """The law of a latency T. An operation that never finishes has T = inf, and the law's mass falls short of 1."""

    @property
    def mean_s(self) -> float:
        """E[T]; inf if T may be."""
        ...

    @property
    def mass(self) -> float:
        """P(T < inf)."""
        ...

    def pdf(self, t: Times) -> FloatArray:
        """Density f(t), per second."""
        ...

    def cdf(self, t: Times) -> FloatArray:
        """F(t) = P(T <= t)."""
        ...

    def sf(self, t: Times) -> FloatArray:
        """P(T > t), exact far into the tail, where 1 - cdf is not."""
        ...

    def quantile(self, p: Times) -> FloatArray:
        """The least t with F(t) >= p, 0 <= p <= 1; inf where p exceeds the mass."""
        ...

    def sample(self, generator: np.random.Generator) -> float:
        """One latency."""
        ...

    def samples(self, generator: np.random.Generator, count: int) -> FloatArray:
        """float64 [count]."""
        ...

    def at(self, episode: int) -> "Law":
        """The law in force in an episode (0, 1, ...): itself, unless it drifts."""
        ...


class _Stationary(ABC):
    """What all laws share that do not change between episodes."""

    @property
    def mass(self) -> float:
        return 1.0

    @abstractmethod
    def samples(self, generator: np.random.Generator, count: int) -> FloatArray:
        """float64 [count]."""

    def sample(self, generator: np.random.Generator) -> float:
        return float(self.samples(generator, 1)[0])


@dataclass(frozen=True)
class Gamma(_Stationary):
    """Gamma with shape k and scale theta_s: mean k theta_s, standard deviation sqrt(k) theta_s. k = 1 has no memory."""

    k: float
    theta_s: float

    def __post_init__(self) -> None:
        _positive(k=self.k, theta_s=self.theta_s)

    @classmethod
    def of_mean(cls, mean_s: float, k: float) -> "Gamma":
        """The Gamma law with this mean and shape."""
        _positive(mean_s=mean_s, k=k)
        return cls(k, mean_s / k)

    @property
    def mean_s(self) -> float:
        return self.k * self.theta_s

    def pdf(self, t: Times) -> FloatArray:
        x = np.asarray(t, np.float64) / self.theta_s
        with np.errstate(divide="ignore", invalid="ignore"):
            density = np.exp(special.xlogy(self.k - 1, x) - x - special.gammaln(self.k)) / self.theta_s
        return _array(np.where(x < 0, 0.0, density))

    def cdf(self, t: Times) -> FloatArray:
        return _array(special.gammainc(self.k, np.maximum(np.asarray(t, np.float64), 0.0) / self.theta_s))

    def sf(self, t: Times) -> FloatArray:
        return _array(special.gammaincc(self.k, np.maximum(np.asarray(t, np.float64), 0.0) / self.theta_s))

    def quantile(self, p: Times) -> FloatArray:
        return _array(special.gammaincinv(self.k, _probability(p)) * self.theta_s)

    def samples(self, generator: np.random.Generator, count: int) -> FloatArray:
        return generator.gamma(self.k, self.theta_s, count)

    def at(self, episode: int) -> "Gamma":
        return self


@dataclass(frozen=True)
class LogNormal(_Stationary):
    """exp of a normal variable with mean mu and standard deviation sigma; its median is exp(mu) seconds."""

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        _positive(sigma=self.sigma)
        if not np.isfinite(self.mu):
            raise ValueError(f"mu: want a finite number, not {self.mu}")

    @classmethod
    def of_moments(cls, mean_s: float, sd_s: float) -> "LogNormal":
        """The lognormal law with this mean and standard deviation."""
        _positive(mean_s=mean_s, sd_s=sd_s)
        variance = float(np.log1p((sd_s / mean_s) ** 2))
        return cls(float(np.log(mean_s)) - variance / 2, float(np.sqrt(variance)))

    @property
    def mean_s(self) -> float:
        return float(np.exp(self.mu + self.sigma**2 / 2))

    def pdf(self, t: Times) -> FloatArray:
        x = np.asarray(t, np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            density = np.exp(-(self._z(x) ** 2) / 2) / (x * self.sigma * np.sqrt(2 * np.pi))
        return _array(np.where(x <= 0, 0.0, density))

    def cdf(self, t: Times) -> FloatArray:
        return _array(special.ndtr(self._z(np.asarray(t, np.float64))))

    def sf(self, t: Times) -> FloatArray:
        return _array(special.ndtr(-self._z(np.asarray(t, np.float64))))

    def quantile(self, p: Times) -> FloatArray:
        return _array(np.exp(self.mu + self.sigma * special.ndtri(_probability(p))))

    def samples(self, generator: np.random.Generator, count: int) -> FloatArray:
        return generator.lognormal(self.mu, self.sigma, count)

    def at(self, episode: int) -> "LogNormal":
        return self

    def _z(self, x: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            return _array((np.log(np.maximum(x, 0.0)) - self.mu) / self.sigma)


@dataclass(frozen=True)
class Never(_Stationary):
    """An operation that does not finish: an image that does not exist, a pod that fits on no node."""

    @property
    def mean_s(self) -> float:
        return float("inf")

    @property
    def mass(self) -> float:
        return 0.0

    def pdf(self, t: Times) -> FloatArray:
        return np.zeros(np.shape(t))

    def cdf(self, t: Times) -> FloatArray:
        return np.zeros(np.shape(t))

    def sf(self, t: Times) -> FloatArray:
        return np.ones(np.shape(t))

    def quantile(self, p: Times) -> FloatArray:
        return _array(np.where(_probability(p) > 0, np.inf, 0.0))

    def samples(self, generator: np.random.Generator, count: int) -> FloatArray:
        return np.full(count, np.inf)

    def at(self, episode: int) -> "Never":
        return self


@dataclass(frozen=True)
class Histogram(_Stationary):
    """Even within each bin (edges_s[i], edges_s[i + 1]], with probability masses[i]: what was measured, smoothed."""

    edges_s: tuple[float, ...]
    masses: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.edges_s) != len(self.masses) + 1 or not self.masses:
            raise ValueError(f"edges_s: want one more than the {len(self.masses)} masses, not {len(self.edges_s)}")
        if self.edges_s[0] < 0 or not bool(np.all(np.diff(self.edges_s) > 0)):
            raise ValueError("edges_s: want ascending times from 0 on")
        if min(self.masses) < 0 or not np.isclose(sum(self.masses), 1.0, rtol=0, atol=1e-9):
            raise ValueError("masses: want numbers >= 0 that sum to 1")

    @classmethod
    def of_samples(cls, samples_s: Sequence[float], bins: int = 160) -> "Histogram":
        """A Gaussian kernel estimate over log time (Silverman's bandwidth), in bins of equal logarithmic width."""
        logs = np.log(np.asarray(samples_s, np.float64))
        if logs.size < 2 or not bool(np.all(np.isfinite(logs))):
            raise ValueError("samples_s: want at least two positive, finite times")
        quartiles = np.quantile(logs, [0.25, 0.75])
        spread = min(float(logs.std()), float(quartiles[1] - quartiles[0]) / 1.349) or float(logs.std())
        bandwidth = max(0.9 * spread * logs.size**-0.2, 1e-3)
        edges = np.linspace(logs.min() - 4 * bandwidth, logs.max() + 4 * bandwidth, bins + 1)
        masses = np.diff(special.ndtr((edges[:, None] - logs) / bandwidth).mean(axis=1))
        masses /= masses.sum()
        return cls(tuple(np.exp(edges).tolist()), tuple(masses.tolist()))

    @property
    def mean_s(self) -> float:
        edges = np.array(self.edges_s)
        return float(((edges[:-1] + edges[1:]) / 2) @ np.array(self.masses))

    def pdf(self, t: Times) -> FloatArray:
        x, edges = np.asarray(t, np.float64), np.array(self.edges_s)
        index = np.searchsorted(edges, x, side="left") - 1
        inside = (index >= 0) & (index < len(self.masses))
        heights = np.array(self.masses) / np.diff(edges)
        return _array(np.where(inside, heights[np.clip(index, 0, len(self.masses) - 1)], 0.0))

    def cdf(self, t: Times) -> FloatArray:
        return _array(np.interp(np.asarray(t, np.float64), self.edges_s, self._below()))

    def sf(self, t: Times) -> FloatArray:
        above = np.concatenate((np.cumsum(self.masses[::-1])[::-1], [0.0]))
        return _array(np.interp(np.asarray(t, np.float64), self.edges_s, np.minimum(above, 1.0)))

    def quantile(self, p: Times) -> FloatArray:
        return _array(np.interp(_probability(p), self._below(), self.edges_s))

    def samples(self, generator: np.random.Generator, count: int) -> FloatArray:
        return self.quantile(generator.random(count))

    def at(self, episode: int) -> "Histogram":
        return self

    def _below(self) -> FloatArray:
        return _array(np.minimum(np.concatenate(([0.0], np.cumsum(self.masses))), 1.0))


Part: TypeAlias = "Gamma | LogNormal | Histogram | Never | Mixture"


_BISECTIONS = 64  # from any bracket to the last digit of a double


@dataclass(frozen=True)
class Mixture(_Stationary):
    """One of several laws, drawn anew for each operation: a cached image or a cold pull. Weights sum to 1."""

    weights: tuple[float, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.parts) or not self.parts:
            raise ValueError(f"weights, parts: want one weight per part, not {len(self.weights)}, {len(self.parts)}")
        if min(self.weights) < 0 or not np.isclose(sum(self.weights), 1.0, rtol=0, atol=1e-9):
            raise ValueError(f"weights: want numbers >= 0 that sum to 1, not {self.weights}")

    @property
    def mean_s(self) -> float:
        return sum(weight * part.mean_s for weight, part in zip(self.weights, self.parts, strict=True) if weight)

    @property
    def mass(self) -> float:
        return sum(weight * part.mass for weight, part in zip(self.weights, self.parts, strict=True))

    def pdf(self, t: Times) -> FloatArray:
        return self._sum([part.pdf(t) for part in self.parts])

    def cdf(self, t: Times) -> FloatArray:
        return self._sum([part.cdf(t) for part in self.parts])

    def sf(self, t: Times) -> FloatArray:
        return self._sum([part.sf(t) for part in self.parts])

    def quantile(self, p: Times) -> FloatArray:
        probabilities = _probability(p)
        finite = [part for weight, part in zip(self.weights, self.parts, strict=True) if weight and part.mass]
        if not finite:
            return _array(np.where(probabilities > 0, np.inf, 0.0))
        reached = probabilities < self.mass - 1e-15
        wanted = np.where(reached, probabilities, 0.0)
        # Parts that never finish push the quantile into the tail of the rest, past all of theirs.
        high = np.max([part.quantile(wanted * part.mass) for part in finite], axis=0) + 1e-9
        while bool(np.any(short := self.cdf(high) < wanted)):
            high = np.where(short, 2 * high, high)
        low = np.zeros_like(high)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            below = self.cdf(middle) < wanted
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return _array(np.where(reached, high, np.inf))

    def samples(self, generator: np.random.Generator, count: int) -> FloatArray:
        which = generator.choice(len(self.parts), size=count, p=np.array(self.weights) / sum(self.weights))
        drawn = np.stack([part.samples(generator, count) for part in self.parts])
        return _array(drawn[which, np.arange(count)])

    def at(self, episode: int) -> "Mixture":
        return self

    def _sum(self, values: list[FloatArray]) -> FloatArray:
        return _array(np.tensordot(np.array(self.weights), np.stack(values), axes=1))


@dataclass(frozen=True)
class Drift:
    """A law that changes between episodes: ((0, A), (30, B)) is A in episodes 0 to 29 and B from then on.

    `at(episode)` is a law; a Drift alone is not, since it has no distribution without an episode.
    """

    stages: tuple[tuple[int, Part], ...]
    starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        starts = tuple(start for start, _ in self.stages)
        if not starts or starts[0] != 0 or list(starts) != sorted(set(starts)):
            raise ValueError(f"stages: want ascending first episodes from 0 on, not {starts}")
        object.__setattr__(self, "starts", starts)

    def at(self, episode: int) -> Part:
        """The law in force in an episode."""
        if episode < 0:
            raise ValueError(f"episode: want 0 or more, not {episode}")
        return self.stages[int(np.searchsorted(self.starts, episode, side="right")) - 1][1]


AnyLaw: TypeAlias = "Part | Drift"


def scaled(law: AnyLaw, factor: float) -> AnyLaw:
    """The law of `factor` times T."""
    _positive(factor=factor)
    match law:
        case Drift():
            return Drift(tuple((start, _scaled(part, factor)) for start, part in law.stages))
        case _:
            return _scaled(law, factor)


def _scaled(law: Part, factor: float) -> Part:
    match law:
        case Gamma():
            return Gamma(law.k, law.theta_s * factor)
        case LogNormal():
            return LogNormal(law.mu + float(np.log(factor)), law.sigma)
        case Histogram():
            return Histogram(tuple(edge * factor for edge in law.edges_s), law.masses)
        case Never():
            return law
        case Mixture():
            return Mixture(law.weights, tuple(_scaled(part, factor) for part in law.parts))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name}: want a positive number, not {value}")


def _probability(p: Times) -> FloatArray:
    values = np.asarray(p, np.float64)
    if not bool(np.all((values >= 0) & (values <= 1))):
        raise ValueError("p: want probabilities between 0 and 1")
    return values


def _array(values: object) -> FloatArray:
    return np.asarray(values, np.float64)


# --- named laws ------------------------------------------------------------------------------------------------------
# Percentiles and moments are public figures for pod start-up and cold starts; the laws through them are ours.

# p50 2.0 s, p99 3.1 s: a narrow body (k = 64) and a few stragglers.
CALM = Mixture((0.97, 0.03), (Gamma.of_mean(2.0, 64), Gamma.of_mean(2.8, 16)))
# p50 2.7 s, p99 16.3 s, 36 s the longest seen: nearly without memory.
NEAR_SATURATION = Gamma.of_mean(3.63, 1.1)
# The image is on the node three times in ten, else it is pulled: seconds to tens of seconds.
IMAGE_PULL = Mixture((0.3, 0.7), (Gamma.of_mean(0.8, 16), LogNormal(2.4, 0.7)))
# Mean 3.24 s, standard deviation 7.10 s.
COLD_START = LogNormal.of_moments(3.24, 7.10)
# Minutes.
NODE_PROVISIONING = Gamma.of_mean(150.0, 9)
VOLUME = LogNormal.of_moments(75.0, 45.0)

PRESETS: Mapping[str, Part] = MappingProxyType(
    {
        "calm": CALM,
        "near-saturation": NEAR_SATURATION,
        "image-pull": IMAGE_PULL,
        "cold-start": COLD_START,
        "node-provisioning": NODE_PROVISIONING,
        "volume": VOLUME,
    }
)
