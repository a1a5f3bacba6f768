"""Loads that take another model's rollout weights from its worker: where from, when, and who waits for whom.

Like a generate, a pull needs one version of its source: it waits until that is made, and what makes the next one waits
for it. Pure functions of the ledger.
"""

from collections.abc import Iterable

from plexrl.v1 import model_pb2, types_pb2, worker_pb2
from plexrl_controller.dispatch.ledger import Ledger
from plexrl_controller.domain.errors import FailedPrecondition, InvalidArgument
from plexrl_controller.domain.ids import CallId, ModelId, WorkerId
from plexrl_controller.domain.records import Call, Model
from plexrl_controller.domain.states import CallKind, ModelState

_GONE = frozenset({ModelState.STATE_LOST, ModelState.DELETING, ModelState.DELETED, ModelState.FAILED})
_MUST_BE_EQUAL = ("precision", "max_sequence_tokens")


def _gone(source: Model) -> bool:
    """Whether the versions that it had will not be there again. What was built only to load into is none of them."""
    return source.state in _GONE or source.log_start > source.applied_sequence


def check_load(ledger: Ledger, model: Model, load: types_pb2.LoadCheckpointSpec) -> None:
    """Whether a model may load this. Raises InvalidArgument."""
    rollout = model.role == model_pb2.MODEL_ROLE_ROLLOUT
    match load.WhichOneof("source"):
        case "rollout" if not rollout:
            raise InvalidArgument(
                f"model {model.name} has training weights: only a model of role rollout takes another's rollout weights"
            )
        case "rollout":
            _check_source(ledger, model, load.rollout)
        case "checkpoint_id" if rollout:
            raise InvalidArgument(
                f"model {model.name} is of role rollout: it takes the rollout weights of a policy, or its base, and no "
                "checkpoint"
            )
        case _:
            pass


def _check_source(ledger: Ledger, model: Model, rollout: types_pb2.RolloutSource) -> None:
    source = ledger.models.get(ModelId(rollout.model_id))
    if source is None or source.job_id != model.job_id:
        raise InvalidArgument(f"load_checkpoint.rollout.model_id: the job has no live model {rollout.model_id!r}")
    if source.role != model_pb2.MODEL_ROLE_POLICY:
        raise InvalidArgument(
            f"load_checkpoint.rollout: model {source.name} makes no versions: name one of role policy"
        )
    own, others = (model_pb2.ModelSettings.FromString(each.settings) for each in (model, source))
    if others.HasField("lora"):
        raise InvalidArgument(
            f"load_checkpoint.rollout: model {source.name} trains adapters, which are not offered here"
        )
    for name in _MUST_BE_EQUAL:
        if (mine := getattr(own, name)) != (its := getattr(others, name)):
            raise InvalidArgument(
                f"load_checkpoint.rollout: settings.{name} is {mine} of {model.name} and {its} of {source.name}: want "
                "them equal"
            )


def version_to_pull(ledger: Ledger, rollout: types_pb2.RolloutSource) -> int:
    """The version that a pull is of, now that it is accepted. Raises InvalidArgument, FailedPrecondition."""
    source = ledger.models[ModelId(rollout.model_id)]
    if source.state is ModelState.STATE_LOST:
        raise FailedPrecondition(f"model {source.name}: {source.message}", reason="STATE_LOST")
    newest = ledger.pending_version(source)
    if rollout.weights_version > newest:
        raise InvalidArgument(
            f"version {rollout.weights_version} is not submitted; the newest of {source.name} is {newest}"
        )
    if 0 < rollout.weights_version < newest:
        raise FailedPrecondition(
            f"version {rollout.weights_version} of {source.name} is replaced by {newest}; only the latest is kept",
            reason="VERSION_GONE",
        )
    return newest


def may_be_ordered(ledger: Ledger, call: Call) -> bool:
    """Whether its worker may be told: what the call takes can be had where it is, or will never be there again, which
    that worker then says. True of any call that takes nothing.
    """
    if call.source_model_id is None:
        return True
    source = ledger.models.get(call.source_model_id)
    if source is None or _gone(source):
        return True
    if source.state is not ModelState.PLACED or source.worker_id is None:
        return False
    return source.weights_version >= call.weights_version and ledger.groups[source.worker_id].connected


def waits_for(ledger: Ledger, call: Call) -> tuple[str, tuple[CallId, ...]]:
    """Why it cannot be pulled yet, and the calls that must finish first."""
    source = ledger.models.get(call.source_model_id) if call.source_model_id is not None else None
    if source is None:
        return "", ()
    if source.state is not ModelState.PLACED:
        return f"model {source.name}, whose weights it takes, is {source.state.name}. {source.message}".strip(), ()
    if source.weights_version < call.weights_version:
        sequenced = ledger.calls_of_model[source.model_id].sequenced
        return (
            f"it takes version {call.weights_version} of model {source.name}, which is at {source.weights_version}",
            tuple(c for s, c in sorted(sequenced.items()) if s <= call.weights_version)[:16],
        )
    return f"the worker of model {source.name}, whose weights it takes, is not connected", ()


def weight_source(ledger: Ledger, call: Call) -> worker_pb2.WeightSource | None:
    """Where a call's weights are now; None for one that takes none, and where they are nowhere any more."""
    source = ledger.models.get(call.source_model_id) if call.source_model_id is not None else None
    if source is None or source.worker_id is None or _gone(source):
        return None
    worker = ledger.workers[source.worker_id]
    return worker_pb2.WeightSource(
        address=worker.address, model_id=source.model_id, weights_version=call.weights_version
    )


def older_pulls(ledger: Ledger, model_id: ModelId, sequence: int) -> list[CallId]:
    """Calls that take a version of the model from before a call of its sequence."""
    return [call_id for call_id, version in ledger.pulls_of_model.get(model_id, {}).items() if version < sequence]


def concerned(ledger: Ledger, *model_ids: ModelId) -> Iterable[WorkerId]:
    """Workers of models that take weights of these, or do so once more while they are being restored."""
    for model_id, recovery in ledger.recoveries.items():
        takes = any(replay.call.source_model_id in model_ids for replay in recovery.replays or ())
        if takes and (worker_id := ledger.models[model_id].worker_id) is not None:
            yield worker_id
    for model_id in model_ids:
        for call_id in ledger.pulls_of_model.get(model_id, ()):
            model = ledger.models.get(ledger.calls[call_id].model_id)
            if model is not None and model.worker_id is not None:
                yield model.worker_id


def source_id(kind: CallKind, spec: types_pb2.CallSpec) -> ModelId | None:
    """The model whose rollout weights a call takes."""
    takes = kind is CallKind.LOAD_CHECKPOINT and spec.load_checkpoint.HasField("rollout")
    return ModelId(spec.load_checkpoint.rollout.model_id) if takes else None
