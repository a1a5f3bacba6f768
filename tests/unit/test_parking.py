"""What is parked in vLLM's scheduler leaves room for what goes on: a scheduler double counts the blocks."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from plexrl_worker.engine.executions import Sampled
from plexrl_worker.engine.parking import Parking

BLOCK_TOKENS = 32


@dataclass(eq=False)
class Request:
    """A running request of vLLM's, as far as parking looks at it."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int

    @property
    def blocks(self) -> int:
        return -(-self.num_computed_tokens // BLOCK_TOKENS)


class Waiting(deque[Request]):
    add_request = deque.append
    pop_request = deque.popleft

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            self.remove(request)


@dataclass
class Scheduler:
    """Blocks, who holds them, and preemption."""

    total_blocks: int
    block_size: int = BLOCK_TOKENS
    max_num_running_reqs: int = 8
    running: list[Request] = field(default_factory=list)
    waiting: Waiting = field(default_factory=Waiting)
    prev_step_scheduled_req_ids: set[str] = field(default_factory=set)
    known: list[Request] = field(default_factory=list)

    @property
    def kv_cache_manager(self) -> Any:
        return SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: self.free_blocks))

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - sum(request.blocks for request in self.known)

    def run(self, *requests: Request) -> None:
        self.running.extend(requests)
        self.known.extend(requests)

    def _preempt_request(self, request: Request, _: float) -> None:
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)


def sampled(*requests: Request) -> Sampled:
    """An execution of these requests; the scheduler knows them by names of its own."""
    ids = [request.request_id for request in requests]
    return Sampled("model", 0, [name.partition("-")[0] for name in ids], {}, set(ids))


def parked(total_blocks: int, *executions: Request) -> tuple[Parking, Scheduler]:
    """Executions of one request each, parked one after the other."""
    scheduler = Scheduler(total_blocks)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    parking = Parking(cast("Any", SimpleNamespace(engine_core=core)))
    for request in executions:
        scheduler.run(request)
        parking.park(request.request_id, sampled(request))
    return parking, scheduler


def test_what_goes_on_may_grow_to_its_end_beside_what_stays_parked() -> None:
    """Else vLLM preempts it for want of a block, finds too few for it to begin again, and so on for ever."""
    short, long = Request("short", 8, 100, 20), Request("long", 8, 150, 150)
    parking, scheduler = parked(8, short, long)
    assert scheduler.free_blocks == 2
    assert parking.take("short", "model", 0) is not None
    assert (scheduler.running, short.blocks) == ([short], 1)
    assert scheduler.free_blocks + short.blocks >= 4
    assert parking.take("long", "model", 0) is not None
    assert list(scheduler.waiting) == [long]


def test_parked_kv_stays_where_both_have_room() -> None:
    short, long = Request("short", 8, 100, 20), Request("long", 8, 150, 150)
    parking, scheduler = parked(9, short, long)
    assert parking.take("short", "model", 0) is not None
    assert (short.blocks, long.blocks) == (1, 5)
    assert not scheduler.waiting


def test_only_the_requests_of_the_execution_that_gives_way_leave() -> None:
    parking, scheduler = parked(100)
    stays, goes, waits = (Request(f"{name}-3f2a", 8, 20, 10) for name in ("stays", "goes", "waits"))
    scheduler.run(stays, goes)
    scheduler.waiting.add_request(waits)
    parking.park("execution", sampled(goes, waits))
    assert scheduler.running == [stays]
    assert not scheduler.waiting
    taken = parking.take("execution", "model", 0)
    assert taken is not None
    assert scheduler.running == [stays, goes]
    assert list(scheduler.waiting) == [waits]


def test_what_runs_beside_is_given_room_to_grow_too() -> None:
    """A request that joins must not find the blocks of a parked one in the way of those that run already."""
    idle, busy = Request("idle", 8, 60, 60), Request("busy", 8, 120, 20)
    parking, scheduler = parked(8, idle)
    scheduler.run(busy)
    assert scheduler.free_blocks == 5
    parking.make_room([64])
    assert idle.blocks == 2
    parking.make_room([96])
    assert (idle.blocks, busy.blocks) == (0, 1)


def test_no_more_go_on_than_run_together_and_the_others_wait_their_turn() -> None:
    """vLLM asserts that no more run than it was told to: one more would end all that run."""
    parking, scheduler = parked(1000)
    scheduler.max_num_running_reqs = 4
    first = [Request(f"first{n}", 8, 40, 20) for n in range(3)]
    later = Request("later", 8, 40, 0)
    scheduler.run(*first)
    scheduler.waiting.add_request(later)
    parking.park("execution", sampled(*first, later))
    beside, queued = [Request(f"beside{n}", 8, 40, 20) for n in range(3)], Request("queued", 8, 40, 0)
    scheduler.run(*beside)
    scheduler.waiting.add_request(queued)
    assert parking.take("execution", "model", 0) is not None
    assert scheduler.running == [*beside, first[0]]
    assert list(scheduler.waiting) == [queued, *first[1:], later]
    assert [request.blocks for request in first] == [1, 0, 0]


def test_where_nothing_more_may_run_all_wait() -> None:
    goes = Request("goes", 8, 40, 20)
    parking, scheduler = parked(1000, goes)
    scheduler.max_num_running_reqs = 1
    stays = Request("stays", 8, 40, 20)
    scheduler.run(stays)
    assert parking.take("goes", "model", 0) is not None
    assert (scheduler.running, list(scheduler.waiting)) == ([stays], [goes])
