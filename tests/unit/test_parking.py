"""What is parked in vLLM's scheduler leaves room for what goes on: a scheduler double counts the blocks."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from plexrl_worker.engine.parking import Parking, Sampled

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


@dataclass
class Scheduler:
    """Blocks, who holds them, and preemption."""

    total_blocks: int
    block_size: int = BLOCK_TOKENS
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


def parked(total_blocks: int, *executions: Request) -> tuple[Parking, Scheduler]:
    """Executions of one request each, parked one after the other."""
    scheduler = Scheduler(total_blocks)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    parking = Parking(cast("Any", SimpleNamespace(engine_core=core)))
    for request in executions:
        scheduler.run(request)
        parking.park(request.request_id, Sampled("model", 0, [request.request_id], {}))
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
