"""Requests of calls that gave way, taken out of vLLM's scheduler and put back: what runs meanwhile never sees them.

Their KV stays where it is as long as there is room for it; it is given up when others need the blocks or the device
goes, and computed again when they are put back. Their tokens, and where their random streams stand, stay in the engine
either way. Private fields of vLLM's scheduler (pinned; `tests/e2e/test_engine_vllm.py` would notice).
"""

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from plexrl_worker.engine.executions import Sampled

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class Parking:
    """The executions of one engine that gave way, by name."""

    def __init__(self, engine: "LLMEngine") -> None:
        self._engine = engine
        self._scheduler: Any = engine.engine_core.engine_core.scheduler
        self._parked: dict[str, Sampled] = {}

    def unfinished(self) -> bool:
        """Whether requests are there that are not parked."""
        return bool(self._scheduler.has_unfinished_requests())

    def park(self, name: str, sampled: Sampled) -> None:
        """Takes an execution's requests out of the scheduler; those of others stay."""
        scheduler, own = self._scheduler, sampled.scheduled_ids
        sampled.running = [request for request in scheduler.running if request.request_id in own]
        scheduler.running = [request for request in scheduler.running if request.request_id not in own]
        sampled.waiting = [request for request in scheduler.waiting if request.request_id in own]
        scheduler.waiting.remove_requests(sampled.waiting)
        self._parked[name] = sampled

    def take(self, name: str, model: str, version: int) -> Sampled | None:
        """Puts an execution's requests back, where it is parked and was begun on these weights; makes room for them.

        As many go on at once as vLLM runs beside those that run already; the others wait their turn, without their KV.
        """
        sampled = self._parked.get(name)
        if sampled is None:
            return None
        if (sampled.model, sampled.version) != (model, version):
            self.forget(name)
            return None
        del self._parked[name]
        self._free(self._growth(sampled.running, sampled.waiting))
        room = self._scheduler.max_num_running_reqs - len(self._scheduler.running)
        self._give_up(sampled, kept=max(0, room))
        self._scheduler.running.extend(sampled.running)
        for request in sampled.waiting:
            self._scheduler.waiting.add_request(request)
        sampled.running, sampled.waiting = [], []
        return sampled

    def make_room(self, tokens: Sequence[int]) -> None:
        """Gives up parked KV where new requests, each of which may grow to so many tokens, would not fit beside it."""
        self._free(sum(map(self._blocks, tokens)))

    def _growth(self, running: Collection[Any], waiting: Collection[Any]) -> int:
        """Blocks that requests may come to hold beyond those that they hold."""
        longest = sum(self._blocks(r.num_prompt_tokens + r.max_tokens) for r in (*running, *waiting))
        return longest - sum(self._blocks(request.num_computed_tokens) for request in running)

    def give_up_kv(self) -> None:
        """Frees the blocks of all parked requests; what they have sampled stays, and KV is computed again later."""
        for sampled in self._parked.values():
            self._give_up(sampled, kept=0)

    def _give_up(self, sampled: Sampled, kept: int) -> None:
        """Frees the blocks of an execution's requests but for the first so many: the others wait first of its own."""
        scheduler = self._scheduler
        for request in reversed(sampled.running[kept:]):
            scheduler._preempt_request(request, time.monotonic())
            sampled.waiting.insert(0, scheduler.waiting.pop_request())
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        del sampled.running[kept:]

    def _free(self, wanted: int) -> None:
        """Gives up parked KV where so many more blocks, and what runs beside, may need more than are free."""
        if not any(sampled.running for sampled in self._parked.values()):
            return
        wanted += self._growth(self._scheduler.running, self._scheduler.waiting)
        if wanted > self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks():
            self.give_up_kv()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // int(self._scheduler.block_size))

    def forget(self, name: str) -> None:
        """Gives up what an execution has sampled; there may be nothing."""
        if (sampled := self._parked.pop(name, None)) is not None:
            self._engine.abort_request(sampled.request_ids)

    def forget_model(self, model: str) -> None:
        """The same for all executions of a model."""
        for name in [name for name, sampled in self._parked.items() if sampled.model == model]:
            self.forget(name)
