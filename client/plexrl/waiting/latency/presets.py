"""How long the stages of a cluster's work take, as named sets of laws.

The figures that the laws go through are public measurements of pod start-up and cold starts; which stage takes which
share of them is our choice. Knows laws; knows nothing of pods.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from plexrl.waiting.laws import (
    CALM,
    COLD_START,
    NODE_PROVISIONING,
    VOLUME,
    AnyLaw,
    Gamma,
    LogNormal,
)

MaybeLaw: TypeAlias = "AnyLaw | None"


@dataclass(frozen=True)
class NodePool:
    """Nodes of one shape: how many there are, and how many there may be when pods find no place.

    The `cpu` and `memory` are quantities that pods can have, `pods` how many a node holds.
    """

    count: int = 10
    limit: int = 10
    cpu: str = "16"
    memory: str = "64Gi"
    pods: int = 110
    name: str = "node"

    def __post_init__(self) -> None:
        if not 0 <= self.count <= self.limit <= 5000:
            raise ValueError(f"count, limit: want 0 <= count <= limit <= 5000, not {self.count}, {self.limit}")
        if not 1 <= self.pods <= 10_000:
            raise ValueError(f"pods: want 1 to 10000 pods on a node, not {self.pods}")


# A scheduler that has nothing else to do, and a first probe that succeeds.
_BRIEF = Gamma.of_mean(0.02, 4.0)
_RUN = Gamma.of_mean(30.0, 4.0)
_STOP = Gamma.of_mean(2.0, 4.0)
_POOL = NodePool()


@dataclass(frozen=True)
class Preset:
    """The law of each stage. A stage without a law takes no time.

    schedule: from a pod's creation until a node is chosen. pull: of an image that the node does not have. start: from
    the image on the node until the containers run. probe: from there until the pod is ready. run: of a pod that ends by
    itself (of a job). stop: from a deletion until the containers are gone, cut off by the grace period. node: until a
    new node is there. volume: until a volume is there for a claim.
    """

    name: str
    description: str
    schedule: MaybeLaw = _BRIEF
    pull: MaybeLaw = None
    start: MaybeLaw = CALM
    probe: MaybeLaw = _BRIEF
    run: MaybeLaw = _RUN
    stop: MaybeLaw = _STOP
    node: MaybeLaw = NODE_PROVISIONING
    volume: MaybeLaw = VOLUME
    pool: NodePool = _POOL


# k of the whole is 1.1 with theta 3.3 s: Gammas of one theta add up to a Gamma of the sum of their k.
_SATURATED_THETA_S = 3.3

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("instant", "nothing takes time", *(None,) * 8),
            Preset("calm", "pods start in 2.0 s (p50), 3.1 s (p99)"),
            Preset(
                "near-saturation",
                "pods start in 2.7 s (p50), 16.3 s (p99)",
                schedule=Gamma(0.5, _SATURATED_THETA_S),
                start=Gamma(0.4, _SATURATED_THETA_S),
                probe=Gamma(0.2, _SATURATED_THETA_S),
            ),
            Preset(
                "image-pull",
                "images are pulled once for each node: seconds to tens of seconds",
                pull=LogNormal(2.4, 0.7),
            ),
            Preset(
                "cold-start", "containers start in 3.24 s on average, with a long tail (sd 7.10 s)", start=COLD_START
            ),
            Preset(
                "node-provisioning",
                "two small nodes, and others that come minutes after they are needed",
                pool=NodePool(count=2, limit=50, cpu="4", memory="16Gi", pods=20),
            ),
        )
    }
)
