"""Kill -9 of each part at each named point of a running cluster, before the commit, through it and after it.

Two models train on one device under a client, another client's jobs come, give way, cancel and go, and a third has
conversations in sessions; or a policy trains on one worker and is sampled on another, which pulls its weights. All
processes and the database are real, the engine is the numpy double. What must hold is
checked from what the clients heard and from the database, at the end: nothing accepted is lost, done twice or hangs,
the training state and the tokens are those of a run that nobody disturbed, and nothing is left on the worker. `make
faults` runs the whole matrix; here a sample.
"""

import itertools
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import plexrl
from tests.support.fault_checks import check
from tests.support.fault_points import Moment
from tests.support.fault_rig import rig, summary, table
from tests.support.fault_scenes import COMING, PULLS, SCENES, SHARED, Kill, Scene, cells

CELLS_PER_CLUSTER = 15
"""Then it is checked, and a fresh one goes on: a promise that was broken is known to be so within so many kills."""

POINTS_WANTED = os.environ.get("PLEXRL_FAULT_POINTS", "")
"""What the names of the points to be run begin with."""

CELLS = slice(*(int(end) if end else None for end in os.environ.get("PLEXRL_FAULT_CELLS", ":").split(":")))
"""Of their cells, in the shuffled order: all, or those that are to be run once more."""

SAMPLES = {
    SHARED: (
        Kill("call dispatched", "controller", Moment.UNDONE),
        Kill("call gave way", "client", Moment.LANDS),
        Kill("call cancelled", "engine", Moment.LANDS),
        Kill("recovery begun", "worker-0", Moment.AFTER),
        Kill("job finishing", "postgres", Moment.AFTER),
        Kill("session parked", "controller", Moment.LANDS),
    ),
    PULLS: (
        Kill("pull dispatched", "controller", Moment.UNDONE),
        Kill("pull accepted", "policy's worker", Moment.LANDS),
        Kill("rollouts restored", "rollouts' worker", Moment.AFTER),
        Kill(COMING, "policy's engine", Moment.DURING),
    ),
}
"""Every part of the one device once, each at another point, and a session's; of the two workers what only they have."""


@dataclass
class Tried:
    """What became of the cells."""

    checked_s: dict[Kill, float] = field(default_factory=dict)
    """Seconds until the clients went on, in clusters whose promises then held."""
    failed: dict[Kill, str] = field(default_factory=dict)


async def run_cells(folder: Path, scene: Scene, kills: list[Kill]) -> Tried:
    """Tries the cells, so many on one cluster; a fresh one takes over what a cluster that failed leaves untold."""
    tried, left = Tried(), list(kills)
    for number in itertools.count():
        batch, left = left[:CELLS_PER_CLUSTER], left[CELLS_PER_CLUSTER:]
        if not batch:
            return tried
        seconds: dict[Kill, float] = {}
        try:
            async with rig(folder / f"cluster-{number}", scene) as made:
                for kill in batch:
                    seconds[kill] = await made.kill(kill)
                    print(f"cluster {number}: {kill}: {seconds[kill]:.1f} s", flush=True)
                await check(made)
        except (AssertionError, TimeoutError, plexrl.PlexRLError) as error:
            hung = batch[len(seconds)] if len(seconds) < len(batch) else None
            tried.failed |= {kill: repr(error)[:600] for kill in ([hung] if hung is not None else batch)}
            if hung is not None:
                left = [kill for kill in batch if kill is not hung] + left
            print(f"cluster {number}: FAILED{f' at {hung}' if hung is not None else ''}: {error!r}", flush=True)
        else:
            tried.checked_s |= seconds
    raise AssertionError("there is always a next number")


async def run_matrix(folder: Path, scene: Scene, kills: list[Kill]) -> None:
    tried = await run_cells(folder, scene, kills)
    print(table(scene, tried.checked_s, tried.failed))
    print(summary(scene, tried.checked_s, tried.failed))
    assert not tried.failed, "\n".join(f"{kill}: {why}" for kill, why in tried.failed.items())


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_the_whole_matrix_has_every_part_at_every_point(scene: Scene) -> None:
    whole = cells(scene)
    assert {(k.point, k.part) for k in whole} == {(point, part) for point in scene.points for part in scene.parts}
    assert set(SAMPLES[scene]) <= set(whole)
    assert {k.part for k in SAMPLES[SHARED]} == set(SHARED.parts)
    assert {k.moment for k in whole if k.part == "controller"} >= set(Moment) - {Moment.DURING}
    assert {k.point for k in whole if k.moment is Moment.DURING} == set(scene.transfers)
    assert set(scene.provoked_by) <= set(scene.points)


@pytest.mark.parametrize("scene", SCENES, ids=str)
@pytest.mark.timeout(1200)
async def test_a_kill_at_a_named_point_loses_nothing(tmp_path: Path, scene: Scene) -> None:
    """G01, G03, G06, G14, G20, G21."""
    await run_matrix(tmp_path, scene, list(SAMPLES[scene]))


@pytest.mark.parametrize("scene", SCENES, ids=str)
@pytest.mark.long
@pytest.mark.timeout(7200)
async def test_a_kill_of_any_part_at_any_point_loses_nothing(tmp_path: Path, scene: Scene) -> None:
    """G01, G03, G06, G14, G20, G21: the whole matrix."""
    kills = [kill for kill in cells(scene) if kill.point.startswith(POINTS_WANTED)]
    random.Random(0).shuffle(kills)
    await run_matrix(tmp_path, scene, kills[CELLS])
