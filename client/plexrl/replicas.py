"""A rollout spread over several models of equal weights, whose last responses go on together on a few of them.

Knows which part of a rollout is asked of whom, and when; how a call travels and who has a device is not its business.
"""

import hashlib
import secrets
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np

from plexrl import errors
from plexrl.at_once import at_once
from plexrl.batch import Tokens
from plexrl.functions import BoundFunction
from plexrl.futures import CallFuture
from plexrl.model import Model
from plexrl.results import Completions, LoadCheckpoint
from plexrl.rollout_pieces import Piece, Rest, left, stitched
from plexrl.shared_session import SharedSession

MAX_RESTS = 64
"""Calls at a time for what one replica left: lengths differ, and each has a call of its own."""


class RolloutReplicas:
    """Models that sample with the same weights, as one: made for models of role "rollout" on workers of their own.

        replicas = plexrl.RolloutReplicas([r0, r1, r2, r3], tail=1, leave=0.2)
        for step in range(steps):
            completions = replicas.generate(prompts, n=8, max_tokens=4096)
            ...
            policy.sync_weights()
            replicas.pull_weights(policy)

    Prompts are spread evenly. A replica's part is over when no more than `leave` of its responses are unfinished; those
    go on at the first `tail` replicas, together with what these have themselves, and the workers of the others are free
    for other jobs while long responses end. leave=0: every part runs to its end where it began. tail_only: the tail
    replicas have no part, and take nothing but what others left. So do jobs that share their rollout workers: the part
    of one that had to wait for the other's tail would hold the whole rollout up.

    Safe to use from many threads; a pull waits for the rollouts that are under way, and rollouts for the pull.
    """

    def __init__(self, models: Sequence[Model], *, tail: int = 1, leave: float = 0.2, tail_only: bool = False) -> None:
        if not models or len({model.model_id for model in models}) < len(models):
            raise errors.InvalidArgument(f"models: {[m.name for m in models]}, want one or more, each once")
        if not 1 <= tail <= len(models):
            raise errors.InvalidArgument(f"tail: {tail}, want 1 to {len(models)}, the number of models")
        if tail_only and (tail == len(models) or not leave):
            raise errors.InvalidArgument(
                "tail_only: nobody would leave anything; want fewer in the tail, and leave > 0"
            )
        if not 0.0 <= leave < 1.0:
            raise errors.InvalidArgument(f"leave: {leave}, want a share of the responses, 0 or more and less than 1")
        self.models = tuple(models)
        self.tail = tail
        self.leave = leave
        self.tail_only = tail_only
        self.tail_sessions = tuple(SharedSession(model) for model in self.models[:tail])
        self._versions: dict[str, int] | None = {model.model_id: 0 for model in models}
        self._source_version = 0
        self._changed = threading.Condition()
        self._sampling = 0
        self._pulling = False

    def __repr__(self) -> str:
        return f"<RolloutReplicas {', '.join(model.name for model in self.models)}>"

    @property
    def source_version(self) -> int:
        """The policy's version that the replicas hold since the last pull; 0, the base, before the first."""
        return self._source_version

    def pull_weights(self, policy: Model, *, timeout_s: float | None = None) -> int:
        """`model.pull_weights(policy)` on all replicas at once; returns the policy's version that all of them hold.

        Raises what a pull ended with, once all have ended, and FailedPrecondition when the policy was synced between
        two of them, so that they differ: pull again.
        """
        with self._changing():
            self._versions = None
            pulled = self._pulled(policy, timeout_s)
            if len({result.source_version for result in pulled.values()}) > 1:
                held = ", ".join(f"{model.name} version {result.source_version}" for model, result in pulled.items())
                raise errors.FailedPrecondition(
                    f"the replicas hold different weights of {policy.name}: {held}; pull again"
                )
            self._versions = {model.model_id: result.weights_version for model, result in pulled.items()}
            self._source_version = next(iter(pulled.values())).source_version
            return self._source_version

    def _pulled(self, policy: Model, timeout_s: float | None) -> dict[Model, LoadCheckpoint]:
        futures: dict[Model, CallFuture[LoadCheckpoint]] = {}
        failures: dict[Model, BaseException] = {}
        for model in self.models:
            try:
                futures[model] = model.pull_weights.submit(policy, timeout_s=timeout_s)
            except errors.PlexRLError as refused:
                failures[model] = refused
        failures |= {model: error for model, future in futures.items() if (error := future.exception()) is not None}
        for model, error in failures.items():
            error.add_note(f"in the pull of {model.name}")
            if not isinstance(error, errors.StateLost):
                # Nothing has been asked for behind it that it could have been needed for: the next pull may follow.
                with suppress(errors.PlexRLError):
                    model.resume()
        for error in failures.values():
            raise error
        return {model: future.result() for model, future in futures.items()}

    def generate(
        self,
        prompts: Sequence[Tokens],
        *,
        max_tokens: int,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        logprobs: bool = True,
        timeout_s: float | None = None,
    ) -> Completions:
        """As `model.generate`, by all replicas; `weights_version` of the result is the policy's, `source_version`.

        A response that was left goes on from its prompt and its tokens so far, with random draws of its own. So it is a
        sample of the same distribution, its log-probabilities are those of the tokens that were sampled, and its tokens
        are not those of a call that nobody divided; nor need they be the same when it is asked for again with the same
        seed, since who is left may depend on who else had the device. Stop strings are not offered: one could begin
        before the cut and end after it.

        All is sampled with the weights of the last pull, else with the base: VersionGone when a replica has been given
        others by somebody else meanwhile. Raises the first error of a part; the others are cancelled then.
        timeout_s: of each call, of which a replica has one and a tail replica some more.
        """
        if len(prompts) == 0:
            raise errors.InvalidArgument("prompts: there are none; send at least one")
        if n < 1:
            raise errors.InvalidArgument(f"n: {n}, want at least 1")
        sampling = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "stop_token_ids": stop_token_ids,
            "logprobs": logprobs,
            "timeout_s": timeout_s,
        }
        seed = secrets.randbits(63) if seed is None else seed
        if not 0 <= seed < 2**64:
            raise errors.InvalidArgument(f"seed: {seed}, want 0 to 2**64 - 1")
        with self._using() as versions:
            rollout = _Rollout(self, versions, prompts, n, max_tokens, seed, sampling)
            return stitched(len(prompts) * n, rollout.sample(), self._source_version)

    @contextmanager
    def _using(self) -> Iterator[dict[str, int]]:
        """Around a rollout: the version of each replica that it samples with."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pulling)
            versions = self._versions
            if versions is None:
                raise errors.FailedPrecondition(
                    "the last pull_weights did not succeed on all replicas, which may differ: pull again"
                )
            self._sampling += 1
        try:
            yield versions
        finally:
            with self._changed:
                self._sampling -= 1
                self._changed.notify_all()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around a pull: a rollout under way has yet to ask for what it needs at its version."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pulling)
            self._pulling = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._sampling)
            yield
        finally:
            with self._changed:
                self._pulling = False
                self._changed.notify_all()


class _Calls:
    """The calls of one rollout, asked for from several threads: when one fails, the others are of no use.

    As a context manager, in each of the threads: an error cancels what has not ended, and the first is raised.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: list[CallFuture[Completions]] = []
        self._failure: BaseException | None = None

    def submit(
        self, generate: BoundFunction[..., Completions], prompts: Sequence[Tokens], **arguments: Any
    ) -> CallFuture[Completions]:
        """Asks for one more. Raises the first error, if there was one."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            future = generate.submit(prompts, **arguments)
            self._futures.append(future)
        return future

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        with self._lock:
            first, self._failure = self._failure, self._failure or error
        if first is None:
            for future in self._futures:
                future.cancel()
        elif first is not error:
            raise first


@dataclass(frozen=True, eq=False)
class _Rollout:
    """One rollout: a part of the prompts to each replica, and what is left of a part to a tail replica."""

    replicas: RolloutReplicas
    versions: Mapping[str, int]
    prompts: Sequence[Tokens]
    n: int
    max_tokens: int
    seed: int
    sampling: Mapping[str, Any]
    calls: _Calls = field(default_factory=_Calls)

    def sample(self) -> list[Piece]:
        """All of it. Raises the first error, when everything else has been cancelled."""
        with ExitStack() as stack:
            for session in self.replicas.tail_sessions:
                stack.enter_context(session.used())
            stack.enter_context(self.calls)
            pieces = at_once(lambda index: self._part(index, self.parts[index]), list(self.parts))
        return [piece for some in pieces for piece in some]

    @cached_property
    def parts(self) -> dict[int, list[int]]:
        """Of each replica that has some, the numbers of its prompts."""
        given = self.replicas
        # Who has no part comes first.
        first = given.tail if given.tail_only else 0
        spread = np.array_split(np.arange(len(self.prompts)), len(given.models) - first)
        return {first + index: part.tolist() for index, part in enumerate(spread) if part.size}

    @cached_property
    def leaves(self) -> bool:
        """Whether anything is left to the tail replicas."""
        return any(self._leave(part) for index, part in self.parts.items() if index >= self.replicas.tail)

    def _leave(self, part: Sequence[int]) -> int:
        return int(self.replicas.leave * len(part) * self.n)

    def _part(self, index: int, part: Sequence[int]) -> list[Piece]:
        """What a replica samples of its part, and then what a tail replica does of the rest."""
        numbers = range(part[0] * self.n, (part[-1] + 1) * self.n)
        leave = self._leave(part) if index >= self.replicas.tail else 0
        own = [self.prompts[number] for number in part]
        with self.calls:
            call = self._submit(index, own, (numbers[0], 0), n=self.n, max_tokens=self.max_tokens, leave=leave)
            pieces: list[Piece] = [(numbers, call.result())]
            if leave:
                begun_with = [self.prompts[number // self.n] for number in numbers]
                rests = left(begun_with, numbers, call.result(), self.max_tokens)
                pieces += self._go_on(index % self.replicas.tail, rests)
        return pieces

    def _go_on(self, tail: int, rests: Sequence[Rest]) -> Iterator[Piece]:
        """What was left, at a tail replica."""
        going: deque[tuple[Rest, CallFuture[Completions]]] = deque()
        for rest in rests:
            if len(going) == MAX_RESTS:
                first, call = going.popleft()
                yield first.numbers, call.result()
            submitted = self._submit(tail, rest.prompts, (rest.numbers[0], 1), max_tokens=rest.max_tokens)
            going.append((rest, submitted))
        for rest, call in going:
            yield rest.numbers, call.result()

    def _submit(
        self, index: int, prompts: Sequence[Tokens], piece: tuple[int, int], **arguments: int
    ) -> CallFuture[Completions]:
        """A call of a replica. piece: its first completion's number, and 1 if that goes on: no two draw alike."""
        model = self.replicas.models[index]
        tails = self.replicas.tail_sessions
        # With a tail replica's own calls, what others left runs together instead of after them.
        generate = tails[index].generate if index < len(tails) and self.leaves else model.generate
        digest = hashlib.blake2b(struct.pack("<QIB", self.seed, *piece), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") & (2**63 - 1)
        version = self.versions[model.model_id]
        return self.calls.submit(generate, prompts, seed=seed, version=version, **self.sampling, **arguments)
