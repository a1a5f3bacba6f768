"""What is killed where: the cells of the fault matrix, and the clusters that they are tried on.

Data alone: how a part is killed at a point is `fault_rig`'s business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from plexrl_controller.domain.states import CallKind, CallState
from tests.support.fault_points import POINTS, PULL_POINTS, Moment

PAUSE_S = 0.1
"""Between two steps of the disturbed run: what is repeated undisturbed must not be long."""
GUEST_PAUSE_S = 0.5
WITHOUT_END = 1_000_000


@dataclass(frozen=True)
class ClientProcess:
    """A client of a cluster, the module that it runs, and which lines of its history count.

    job: empty for one that makes its jobs' names itself. counted: a key that only whole lines have. to_go_on: how many
    more of them it must write after a kill to be well.
    """

    module: str
    history: str
    job: str = ""
    counted: str = ""
    to_go_on: int = 1
    pause_s: float = PAUSE_S


@dataclass(frozen=True)
class Provocation:
    """A kill that brings a point about. during: a transfer in which it comes. once: a query that says that now is when
    it has the consequence. still_s: the part is not killed, it does nothing for so long.
    """

    part: str
    during: str = ""
    once: str = ""
    still_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Scene:
    """A cluster, who uses it, and which parts are killed at which points.

    transfers: points that no commit writes. provoked_by: points that are reached only once something else was done to a
    part; where that is a kill, the one that counts is the second. models: which model's worker and engine a part is.
    """

    name: str
    points: tuple[str, ...]
    parts: tuple[str, ...]
    workers: int
    device_state_bytes: str
    snapshot_replay_s: float
    clients: tuple[ClientProcess, ...]
    provoked_by: Mapping[str, Provocation]
    transfers: tuple[str, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


TRAINED = ClientProcess("fault_client", "history.jsonl", "matrix", "step", to_go_on=4)
GUEST = ClientProcess("fault_guest", "guest.jsonl", counted="visit", pause_s=GUEST_PAUSE_S)
CONVERSED = ClientProcess("fault_rollouts", "rollouts.jsonl", "rollouts", "round")
PULLED = ClientProcess("fault_pulls", "pulls.jsonl", "pulls", "round", to_go_on=2)

SHARED = Scene(
    name="one device",
    points=tuple(POINTS),
    parts=("client", "controller", "worker-0", "engine", "postgres"),
    workers=1,
    device_state_bytes="24K",
    snapshot_replay_s=0.02,
    clients=(TRAINED, GUEST, CONVERSED),
    provoked_by={
        "recovery begun": Provocation("engine"),
        "model restored": Provocation("worker-0"),
        "worker registered": Provocation("worker-0"),
    },
)

ASKED, COMING, ALL_HERE = "weights asked for", "weights coming", "weights all here"
_STAND = f"""
SELECT pull.state = '{{pull}}' AND sync.state = '{CallState.SUCCEEDED.name}' AND {{more}}
  FROM (SELECT * FROM calls WHERE source_model_id IS NOT NULL ORDER BY sequence DESC LIMIT 1) AS pull,
       (SELECT * FROM calls WHERE kind = '{CallKind.SYNC_WEIGHTS.name}' ORDER BY sequence DESC LIMIT 1) AS sync
"""
_PULL_IS_DISPATCHED = f"""
SELECT count(*) > 0 FROM calls WHERE source_model_id IS NOT NULL AND state = '{CallState.DISPATCHED.name}'
"""
_SAMPLED_ONCE = f"""
(SELECT array_agg(state) FROM calls WHERE model_id = pull.model_id AND kind = '{CallKind.GENERATE.name}'
    AND weights_version = pull.sequence) = ARRAY['{CallState.SUCCEEDED.name}']
"""
_POLICY_IS_AHEAD = _STAND.format(pull=CallState.CANCELLED.name, more="true")
_ROLLOUTS_ARE_UP = _STAND.format(pull=CallState.SUCCEEDED.name, more=_SAMPLED_ONCE)
"""They have what was pulled, and their client is going to sample it once more."""
PULLS = Scene(
    name="two workers",
    points=(*PULL_POINTS, ASKED, COMING, ALL_HERE),
    parts=(
        *("client", "controller", "policy's worker", "policy's engine"),
        *("rollouts' worker", "rollouts' engine", "postgres"),
    ),
    workers=2,
    device_state_bytes="24M",
    snapshot_replay_s=0.3,
    clients=(PULLED, GUEST),
    provoked_by={
        # One that ends within 50 ms is never told as started.
        "pull started": Provocation("policy's worker", once=_PULL_IS_DISPATCHED, still_s=0.2),
        "pull tried again": Provocation("rollouts' engine", during=COMING),
        "rollouts recovering": Provocation("rollouts' worker", once=_ROLLOUTS_ARE_UP),
        "rollouts restored": Provocation("rollouts' worker", once=_ROLLOUTS_ARE_UP),
        "rollouts lost": Provocation("rollouts' worker", once=_POLICY_IS_AHEAD),
    },
    transfers=(ASKED, COMING, ALL_HERE),
    models={
        "policy's worker": "policy",
        "policy's engine": "policy",
        "rollouts' worker": "rollouts",
        "rollouts' engine": "rollouts",
    },
)
SCENES = (SHARED, PULLS)


@dataclass(frozen=True)
class Kill:
    """One cell of the matrix."""

    point: str
    part: str
    moment: Moment

    def __str__(self) -> str:
        return f"{self.point}, {self.part}, {self.moment.value}"


def cells(scene: Scene) -> list[Kill]:
    """Every point, part and moment. A commit can only land without the process that asked for it."""
    return [
        Kill(point, part, moment)
        for point in scene.points
        for part in scene.parts
        for moment in Moment
        if (moment is Moment.DURING) == (point in scene.transfers)
        if moment is not Moment.UNDONE or part == "controller"
        if moment is not Moment.LANDS or part != "postgres"
    ]
