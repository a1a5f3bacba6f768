"""The faults that strike a world, one after the other, drawn from its seed."""

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.faults.client import Client
from tests.simulation.faults.controller import ControllerLife
from tests.simulation.faults.store import Moment
from tests.simulation.faults.worker import WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.faults.world import World


@dataclass
class Cut:
    """When a part's messages do not arrive."""

    until_s: float = 0.0


async def strike(world: "World") -> None:
    """As many faults as the plan says, unless all clients have ended before."""
    chance = world.chance_of("faults")
    await asyncio.sleep(1.0)
    for _ in range(world.fault_count):
        await asyncio.sleep(chance.expovariate(1 / 1.5))
        if all(task.done() for task in world.client_tasks.values()):
            return
        await _fault(world, chance)
    await asyncio.sleep(chance.uniform(0.0, 3.0))


async def _fault(world: "World", chance: random.Random) -> None:
    kinds = {
        "controller dies": 3,
        "controller dies in a commit": 5,
        "controller is replaced": 2,
        "worker dies": 4,
        "engine dies": 4,
        "stream breaks": 5,
        "stream is cut": 2,
        "worker is cut off": 2,
        "client dies": 3,
        "client is cut off": 2,
        "commits fail": 3,
        "store stalls": 2,
        "snapshots are damaged": 2,
    }
    kind = chance.choices(list(kinds), list(kinds.values()))[0]
    worker, client = chance.choice(world.workers), chance.choice(world.clients)
    for_s = chance.choice([0.1, 1.0, 4.0, 15.0])
    now_s = asyncio.get_running_loop().time()
    moment = chance.choice(list(Moment))
    world.faults.append(kind)
    world.note("FAULT", kind, worker.name, client.name, for_s, moment.name)
    match kind:
        case "controller dies":
            await _kill_controller(world, for_s)
        case "controller dies in a commit":
            world.database.kill = chance.randint(1, 6), moment
            life = world.leader()
            if life is not None:
                world.spawn(_restart_when_dead(world, life, for_s))
        case "controller is replaced":
            # The old one still runs and does not know: its commits and orders must be refused.
            old = world.leader()
            await world.start_controller()
            if old is not None:
                world.spawn(_end_later(world, old, for_s))
        case "worker dies":
            _kill_worker(world, worker, for_s, chance)
        case "engine dies":
            worker.kill_engine()
        case "stream breaks":
            worker.break_stream()
        case "stream is cut":
            world.cuts[f"{worker.name}/stream"] = Cut(now_s + for_s)
            worker.break_stream()
        case "worker is cut off":
            for way in ("registry", "stream"):
                world.cuts[f"{worker.name}/{way}"] = Cut(now_s + for_s)
            worker.break_stream()
        case "client dies":
            await _kill_client(world, client, for_s)
        case "client is cut off":
            world.cuts[client.name] = Cut(now_s + for_s * 2)
        case "commits fail":
            world.database.failures = [moment] * chance.randint(1, 4)
        case "snapshots are damaged":
            _damage(world, chance)
        case "store stalls":
            world.database.stalled_until_s = now_s + for_s
        case _:
            raise AssertionError(kind)


def _damage(world: "World", chance: random.Random) -> None:
    """Flips bits in the newest snapshot of a model: its manifest is another then."""
    if world.shared.snapshots:
        snapshot_id = chance.choice(list(world.shared.snapshots))
        world.shared.snapshots[snapshot_id] = "damaged", world.shared.snapshots[snapshot_id][1]


async def _kill_controller(world: "World", for_s: float) -> None:
    life = world.leader()
    if life is not None:
        life.kill()
        world.spawn(_restart_when_dead(world, life, for_s))


async def _restart_when_dead(world: "World", life: ControllerLife, after_s: float) -> None:
    await life.dead.wait()
    await asyncio.sleep(after_s)
    if world.leader() is None:
        await world.start_controller()


async def _end_later(world: "World", life: ControllerLife, after_s: float) -> None:
    await asyncio.sleep(after_s)
    life.kill()


def _kill_worker(world: "World", worker: WorkerProcess, for_s: float, chance: random.Random) -> None:
    if not worker.alive:
        return
    worker.kill()
    others = [w for w in world.workers if not w.alive and w is not worker]
    if others and chance.random() < 0.5:
        # Ports are given to whoever comes first.
        other = chance.choice(others)
        worker.address, other.address = other.address, worker.address
    world.spawn(_restart_worker(world, worker, for_s))


async def _restart_worker(world: "World", worker: WorkerProcess, after_s: float) -> None:
    await asyncio.sleep(after_s)
    world.start_worker(worker)


async def _kill_client(world: "World", client: Client, for_s: float) -> None:
    task = world.client_tasks[client.name]
    if task.done():
        return
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        return
    world.client_tasks[client.name] = asyncio.ensure_future(_restart_client(world, client, for_s))


async def _restart_client(world: "World", client: Client, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await client.run()
