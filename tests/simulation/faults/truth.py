"""What must be true, whatever fails: every request that clients made, what they heard of it, and the checks.

Knows requests and answers only, nothing of how the controller keeps them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plexrl import wire
from plexrl.v1 import call_pb2, types_pb2
from tests.simulation.faults.state import Made, Shared, State

TERMINAL = (
    types_pb2.CALL_STATE_SUCCEEDED,
    types_pb2.CALL_STATE_FAILED,
    types_pb2.CALL_STATE_CANCELLED,
    types_pb2.CALL_STATE_EXPIRED,
)
# How a call may end that nobody is to blame for.
EXPLAINED = {
    types_pb2.CALL_REASON_UNSPECIFIED,
    types_pb2.CALL_REASON_PREDECESSOR_FAILED,
    types_pb2.CALL_REASON_NON_FINITE,
    types_pb2.CALL_REASON_ATTEMPTS_EXHAUSTED,
    types_pb2.CALL_REASON_STATE_LOST,
    types_pb2.CALL_REASON_CANCELLED_BY_CLIENT,
    types_pb2.CALL_REASON_JOB_ENDED,
    types_pb2.CALL_REASON_VERSION_REPLACED,
    types_pb2.CALL_REASON_DEADLINE_EXCEEDED,
}
# The model that they take weights from lost its state, or loaded another.
EXPLAINED_OF_PULLS = {types_pb2.CALL_REASON_VERSION_GONE}


@dataclass(frozen=True)
class Outcome:
    """How a call ended, as a client heard it."""

    state: int
    reason: int
    attempt: int
    result: bytes
    weights_version: int

    @property
    def succeeded(self) -> bool:
        """Whether it was applied."""
        return self.state == types_pb2.CALL_STATE_SUCCEEDED


@dataclass
class Request:
    """A submit, resent until its answer is known."""

    message: call_pb2.SubmitCallRequest
    after_version: int
    """A version that its model had for certain before it was submitted."""
    call_id: str = ""
    rejected: str = ""
    outcome: Outcome | None = None
    acknowledged: bool = False

    @property
    def function(self) -> str:
        """Its function's name."""
        return self.message.spec.WhichOneof("function") or ""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.message.request_id} ({self.function} {self.message.sequence or ''})"


@dataclass
class ModelTruth:
    """A model and everything that was asked of it."""

    model_id: str
    seed: int
    requests: list[Request] = field(default_factory=list)
    samples: str = ""
    """The model whose rollout weights it takes, for one that takes any."""


@dataclass
class JobTruth:
    """A job, by the request ids of its calls."""

    job_id: str
    name: str
    tenant: str
    models: dict[str, ModelTruth] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    over: bool = False
    """It finished or expired."""


class Truth:
    """All jobs, and who may be blamed."""

    def __init__(self, shared: Shared, blame: Callable[[str], None]) -> None:
        self.jobs: list[JobTruth] = []
        self.shared = shared
        self.blame = blame

    def hear(self, job: JobTruth, call: call_pb2.Call, *, fresh: bool = False, whole: bool = True) -> Request | None:
        """A client heard of a call. `fresh`: asked for after what is known was known; `whole`: with its result."""
        request = job.requests.get(call.request_id)
        if request is None:
            self.blame(f"job {job.name} hears of call {call.call_id} that it never asked for: {call.request_id}")
            return None
        if request.call_id and request.call_id != call.call_id:
            self.blame(f"{request.name} is two calls: {request.call_id} and {call.call_id}")
        if call.sequence != request.message.sequence or call.model_id != request.message.model_id:
            self.blame(f"{request.name} came back as sequence {call.sequence} of model {call.model_id}")
        request.call_id = call.call_id
        if call.state in TERMINAL and (whole or call.state != types_pb2.CALL_STATE_SUCCEEDED):
            self._hear_end(request, call)
        elif fresh and request.outcome is not None and call.state not in TERMINAL:
            self.blame(f"{request.name} ended as {request.outcome} and is {call.state} again")
        return request

    def _hear_end(self, request: Request, call: call_pb2.Call) -> None:
        outcome = Outcome(
            call.state,
            call.reason,
            call.attempt,
            call.result.SerializeToString(deterministic=True),
            call.weights_version,
        )
        known = request.outcome
        if known is None:
            request.outcome = outcome
            self._check_made(request, call)
            gone = (
                call.reason == types_pb2.CALL_REASON_VERSION_GONE
                and request.message.spec.load_checkpoint.rollout.model_id
            )
            if outcome.reason not in EXPLAINED and not gone:
                reason = types_pb2.CallReason.Name(call.reason)
                self.blame(f"{request.name} ended as {reason}: {call.error.message}")
            if outcome.succeeded and not outcome.result and not request.acknowledged:
                self.blame(f"{request.name} succeeded without a result")
            return
        if request.acknowledged or not outcome.result or not known.result:
            known, outcome = _bare(known), _bare(outcome)
        if known != outcome:
            self.blame(f"{request.name} has two outcomes: {known} and {outcome}")

    def _check_made(self, request: Request, call: call_pb2.Call) -> None:
        """A result is that of the call's current attempt: none of a stale fence."""
        number = execution_of(call.result)
        if number is None:
            return
        made: Made = self.shared.made[number]
        # A replay says what the execution said whose outcome nobody had heard.
        attempts = range(call.attempt + 1) if number in self.shared.replayed else [call.attempt]
        if made.call_id != call.call_id or made.attempt not in attempts:
            self.blame(f"{request.name}, attempt {call.attempt}, has the result of {made}")

    # After the end.

    def check(self, lost: frozenset[str]) -> None:
        """Everything that can only be judged with all outcomes known. `lost`: models whose state was, at some time."""
        for job in self.jobs:
            self._check_pulls(job, lost)
            for request in job.requests.values():
                if request.call_id and request.outcome is None:
                    self.blame(f"{request.name} was accepted as {request.call_id} and has no outcome")
            versions: dict[str, dict[int, set[int]]] = {}
            for model in sorted(job.models.values(), key=lambda model: bool(model.samples)):
                versions[model.model_id] = self._check_model(model, versions.get(model.samples, {}))

    def _check_pulls(self, job: JobTruth, lost: frozenset[str]) -> None:
        """A version that somebody is to take elsewhere is not replaced before that, unless its state was lost."""
        for request in job.requests.values():
            gone = request.outcome is not None and request.outcome.reason == types_pb2.CALL_REASON_VERSION_GONE
            if gone and request.message.spec.load_checkpoint.rollout.model_id not in lost:
                self.blame(f"{request.name} found its version replaced")

    def _check_model(self, model: ModelTruth, sampled: dict[int, set[int]]) -> dict[int, set[int]]:
        """Goes through the sequence with every state that the outcomes allow: mostly one.

        A call that ended as STATE_LOST may have been applied before its state was lost: the protos say so. Returns its
        versions, each with the rollout weights that it may be; `sampled` has those of the model whose weights it takes.
        """
        states = frozenset({State.base(model.seed)})
        versions = {0: {state.rollout for state in states}}
        checkpoints: dict[str, frozenset[State]] = {}
        by_number: dict[int, Request] = {}
        for request in sorted((r for r in model.requests if r.call_id), key=lambda r: r.message.sequence):
            sequence, outcome, spec = request.message.sequence, request.outcome, request.message.spec
            if not sequence:
                continue
            if sequence in by_number:
                self.blame(f"sequence {sequence} is both {by_number[sequence].name} and {request.name}")
            by_number[sequence] = request
            pulls = spec.load_checkpoint.HasField("rollout")
            if outcome is not None and outcome.reason == types_pb2.CALL_REASON_STATE_LOST and not pulls:
                states |= {state.after(request.function, spec) for state in states}
            if outcome is None or not outcome.succeeded:
                continue
            result = types_pb2.CallResult.FromString(outcome.result)
            match request.function:
                case "load_checkpoint" if pulls:
                    taken = sampled.get(result.load_checkpoint.source_version, set())
                    states = frozenset(State(rollout, rollout) for rollout in taken)
                case "load_checkpoint":
                    source = spec.load_checkpoint.checkpoint_id
                    states = checkpoints.get(source, frozenset()) if source else frozenset({State.base(model.seed)})
                case _:
                    states = frozenset(state.after(request.function, spec) for state in states)
            states = self._check_result(request, result, states)
            if request.function == "save_checkpoint":
                checkpoints[result.save_checkpoint.checkpoint.checkpoint_id] = states
            if request.function in ("load_checkpoint", "sync_weights"):
                versions[sequence] = {state.rollout for state in states}
        for request in model.requests:
            if request.function == "generate" and request.outcome is not None and request.outcome.succeeded:
                self._check_generate(request, request.outcome, versions)
        return versions

    def _check_result(
        self, request: Request, result: types_pb2.CallResult, states: frozenset[State]
    ) -> frozenset[State]:
        """The states that the result allows."""
        if not result.WhichOneof("outcome"):
            return states
        train, step = train_digest_of(result), step_of(result)
        left = frozenset(s for s in states if train in (None, s.train) and step in (None, s.step))
        if not left:
            self.blame(f"{request.name} ran on another state than its predecessors make: {train}, {step} of {states}")
        version = result.sync_weights.weights_version or result.load_checkpoint.weights_version
        if version and version != request.message.sequence:
            self.blame(f"{request.name} made version {version}")
        return left or states

    def _check_generate(self, request: Request, outcome: Outcome, versions: dict[int, set[int]]) -> None:
        result = types_pb2.CallResult.FromString(outcome.result).generate
        version = result.weights_version
        if version != outcome.weights_version:
            self.blame(f"{request.name} resolved to version {outcome.weights_version}, made by {version}")
        if version < request.after_version:
            self.blame(f"{request.name} was made by version {version}; {request.after_version} was there before it")
        selector = request.message.spec.generate.version
        if selector.WhichOneof("selector") == "exact" and version != selector.exact:
            self.blame(f"{request.name} asked for exactly {selector.exact} and got {version}")
        rollout = int(wire.int32s(result.completions.token_ids)[0])
        if rollout not in versions.get(version, ()):
            self.blame(f"{request.name} was made by other weights than version {version}: {rollout}, {versions}")


def _bare(outcome: Outcome) -> Outcome:
    return Outcome(outcome.state, outcome.reason, outcome.attempt, b"", outcome.weights_version)


def train_digest_of(result: types_pb2.CallResult) -> int | None:
    """The training state that a result speaks of."""
    match result.WhichOneof("outcome"):
        case "score":
            return int(wire.float32s(result.score.logprobs)[0])
        case "forward_backward":
            return int(result.forward_backward.loss)
        case "optim_step":
            return int(result.optim_step.grad_norm / 2.0**28)
        case _:
            return None


def step_of(result: types_pb2.CallResult) -> int | None:
    """The optimizer steps that a result speaks of."""
    match result.WhichOneof("outcome"):
        case "optim_step":
            return result.optim_step.step
        case "load_checkpoint":
            return result.load_checkpoint.step
        case "save_checkpoint":
            return result.save_checkpoint.checkpoint.step
        case _:
            return None


def execution_of(result: types_pb2.CallResult) -> int | None:
    """The number of the execution that made a result."""
    number: Any = None
    match result.WhichOneof("outcome"):
        case "generate":
            number = wire.int32s(result.generate.completions.token_ids)[1]
        case "score":
            number = wire.float32s(result.score.logprobs)[1]
        case "forward_backward":
            number = result.forward_backward.kl
        case "optim_step":
            number = result.optim_step.grad_norm % 2.0**28
        case _:
            return None
    return int(number)
