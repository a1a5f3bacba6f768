"""Keeps this worker registered with whichever controller leads: announces a life, renews its lease, obeys the answers.

Has its own connection, so that calls never delay it. Never lets the daemon believe in a life that the controller ended.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc
import structlog
from google.rpc import status_pb2
from grpc import aio

from plexrl import wire
from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import registry_pb2_grpc
from plexrl_worker.errors import StaleIncarnation
from plexrl_worker.fences import Fences

_log = structlog.get_logger(__name__)

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 5.0
_RPC_LIMIT_S = 10.0
_HURRY_INTERVAL_S = 0.1
_STATUS_DETAILS_KEY = "grpc-status-details-bin"


class Lives(Protocol):
    """What a registration does to the worker, and asks of it."""

    def announcement(self, life_nonce: int) -> r.RegisterRequest:
        """Who this worker is."""
        ...

    def situation(self) -> r.SynchronizeRequest:
        """What it holds and does, without its identity."""
        ...

    def known_models(self) -> set[str]:
        """Models that are here and that no queued order places or drops."""
        ...

    async def drop_models(self, model_ids: set[str]) -> None:
        """These models do not belong here."""
        ...

    async def end_life(self) -> None:
        """Everything of this life is void."""
        ...

    def registered(self, worker_id: str) -> None:
        """A life began."""
        ...

    def stop(self) -> None:
        """The controller lets the daemon go."""
        ...

    def unheard(self) -> None:
        """The controller did not answer."""
        ...


class Registration:
    """The registration of one daemon."""

    def __init__(
        self,
        stub: "registry_pb2_grpc.RegistryServiceAsyncStub",
        metadata: tuple[tuple[str, str], ...],
        fences: Fences,
        lives: Lives,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self._fences = fences
        self._lives = lives
        self._sleep = sleep
        self._life_nonce = secrets.randbits(63)
        self._turns = 0
        self._in_a_hurry = asyncio.Event()

    @property
    def turns(self) -> int:
        """Answers and failures so far: a number that stands still means that this loop does."""
        return self._turns

    def hurry(self) -> None:
        """Synchronizes now and often: there is something to say that the controller must hear soon."""
        self._in_a_hurry.set()

    async def run(self) -> None:
        """Registers and renews until cancelled; a lost lease begins a new life."""
        while True:
            interval_s = await self._register()
            try:
                await self._renew(interval_s)
            except StaleIncarnation as error:
                _log.warning("life_ended", worker_incarnation=self._fences.worker_incarnation, message=error.message)
                self._fences.worker_incarnation = 0
                self._life_nonce = secrets.randbits(63)
                await self._lives.end_life()

    async def _register(self) -> float:
        backoff_s = _MIN_BACKOFF_S
        while True:
            try:
                answer = await self._stub.Register(
                    self._lives.announcement(self._life_nonce), metadata=self._metadata, timeout=_RPC_LIMIT_S
                )
            except aio.AioRpcError as error:
                _log.warning("register_failed", code=error.code().name, details=error.details(), again_in_s=backoff_s)
            else:
                return self._begin_life(answer)
            self._turns += 1
            # Jitter, so that a cluster of workers does not knock in step after a controller's restart.
            await self._sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    def _begin_life(self, answer: r.RegisterResponse) -> float:
        self._turns += 1
        self._fences.worker_id = answer.worker_id
        self._fences.worker_incarnation = answer.worker_incarnation
        self._fences.adopt(answer.leader_term)
        self._lives.registered(answer.worker_id)
        _log.info(
            "registered",
            worker=answer.worker_id,
            worker_incarnation=answer.worker_incarnation,
            leader_term=answer.leader_term,
        )
        return max(answer.sync_interval.ToNanoseconds() / 1e9, 0.05)

    async def _renew(self, interval_s: float) -> None:
        while True:
            started_s = time.monotonic()
            try:
                await self._synchronize(limit_s=max(interval_s * 2, 1.0))
            except aio.AioRpcError as error:
                if reason_of(error) == StaleIncarnation.reason:
                    raise StaleIncarnation(error.details() or "the controller knows a newer life") from error
                _log.warning("synchronize_failed", code=error.code().name, details=error.details())
                self._lives.unheard()
            self._turns += 1
            await self._pause(max(interval_s - (time.monotonic() - started_s), 0.01))

    async def _pause(self, seconds: float) -> None:
        if self._in_a_hurry.is_set():
            await self._sleep(min(seconds, _HURRY_INTERVAL_S))
            return
        pauses = [asyncio.ensure_future(self._sleep(seconds)), asyncio.ensure_future(self._in_a_hurry.wait())]
        try:
            await asyncio.wait(pauses, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pause in pauses:
                pause.cancel()

    async def _synchronize(self, limit_s: float) -> None:
        request = self._lives.situation()
        request.worker_id = self._fences.worker_id
        request.worker_incarnation = self._fences.worker_incarnation
        # A model that is placed here while the answer is on its way is not in it, and must not be dropped for that.
        known = self._lives.known_models()
        answer = await self._stub.Synchronize(request, metadata=self._metadata, timeout=limit_s)
        if answer.leader_term < self._fences.leader_term:
            # Of a controller that no longer leads and does not know it: its list lacks what the next one placed.
            _log.warning(
                "answer_of_an_older_term", leader_term=answer.leader_term, newest=self._fences.leader_term,
                message="a controller that was replaced; where its database is a restored backup, restart this worker",
            )  # fmt: skip
            return
        self._fences.adopt(answer.leader_term)
        if strangers := known - set(answer.model_ids):
            _log.info("models_dropped", model_ids=sorted(strangers))
            await self._lives.drop_models(strangers)
        if answer.directive == r.WORKER_DIRECTIVE_STOP:
            self._lives.stop()


def reason_of(error: aio.AioRpcError) -> str:
    """The stable reason of an rpc's error; its code's name when it carries none."""
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            info = wire.error_info(status_pb2.Status.FromString(value))
            if info is not None:
                return info.reason
    code: grpc.StatusCode = error.code()
    return code.name
