"""A measured quantity, ours beside a peer's, as medians with their spread over repetitions."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median and range over repetitions."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return median(self.values)

    @property
    def low(self) -> float:
        """The least."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The greatest."""
        return max(self.values)

    def as_json(self) -> dict[str, Any]:
        """The report's form."""
        return {"median": self.median, "min": self.low, "max": self.high, "runs": len(self.values)}


@dataclass(frozen=True)
class Measurement:
    """One row of the report. `ratio` is ours / peer's, taken pairwise within each repetition."""

    name: str
    unit: str
    ours: Spread
    peer: Spread
    peer_name: str

    @property
    def ratio(self) -> Spread:
        """Pairwise ours / peer's: the machine's drift between repetitions drops out."""
        return Spread(tuple(a / b for a, b in zip(self.ours.values, self.peer.values, strict=True)))

    def as_json(self) -> dict[str, Any]:
        """The report's form."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours.as_json(),
            "peer": self.peer.as_json(),
            "peer_name": self.peer_name,
            "ratio": self.ratio.as_json() | {"interval_95": ratio_interval(self.ratio)},
        }


def ratio_interval(ratios: Spread, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median ratio over repetitions (Efron 1979); its range with few of them."""
    if len(ratios.values) < 3:
        return ratios.low, ratios.high
    draws = random.Random(seed)
    medians = sorted(median(draws.choices(ratios.values, k=len(ratios.values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
