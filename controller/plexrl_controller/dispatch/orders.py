"""Orders, written from records."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from plexrl.v1 import model_pb2, registry_pb2, types_pb2, worker_pb2
from plexrl_controller.dispatch.replay_log import Replay, RestorePoint, Source
from plexrl_controller.domain.ids import ModelId
from plexrl_controller.domain.records import Call, Model, Snapshot
from plexrl_controller.domain.states import CallKind

_TERM_BITS = 32


@dataclass(frozen=True, slots=True)
class ReplayOrder:
    """What a replay's report answers: a place in the replays of one recovery of a model."""

    model_id: ModelId
    recovery: int
    place: int


class OrderBook:
    """Numbers orders and remembers those whose report does not name a call that it ends.

    Numbers are of one term: a late report of an earlier leader's order never passes for one of this leader's.
    """

    def __init__(self, term: int) -> None:
        self.term = term
        self._numbers = count((term << _TERM_BITS) + 1)
        self._models: dict[int, ModelId] = {}
        self._replays: dict[int, ReplayOrder] = {}
        self._snapshots: dict[int, Snapshot] = {}

    def model_of(self, order_id: int) -> ModelId | None:
        """The model of a deploy or drop order that has not been settled; asking settles it."""
        return self._models.pop(order_id, None)

    def replay_of(self, order_id: int, *, settle: bool) -> ReplayOrder | None:
        """What a replay order was for; `settle` forgets it."""
        return self._replays.pop(order_id, None) if settle else self._replays.get(order_id)

    def snapshot_of(self, order_id: int) -> Snapshot | None:
        """The snapshot that an order which has not been settled writes; asking settles it."""
        return self._snapshots.pop(order_id, None)

    def deploy(
        self, model: Model, incarnation: int, point: RestorePoint | None = None, applied_sequence: int = 0
    ) -> worker_pb2.Order:
        """Build the model from its base, or restore it from a copy.

        `applied_sequence`: where its sequence stands then, which is above the copy's number when no call in between
        changed anything.
        """
        order = self._order(incarnation)
        order.deploy.CopyFrom(
            worker_pb2.DeployOrder(
                model_id=model.model_id,
                job_id=model.job_id,
                base=model_pb2.ModelBase.FromString(model.base),
                role=model_pb2.ModelRole.ValueType(model.role),
                settings=model_pb2.ModelSettings.FromString(model.settings),
                checkpoint_id=point.copy_id if point is not None and point.source is Source.CHECKPOINT else "",
                applied_sequence=applied_sequence,
                weights_version=model.weights_version if point is None else point.weights_version,
                from_host_image=point is not None and point.source is Source.HOST_IMAGE,
                host_image_sequence=point.sequence if point is not None and point.source is Source.HOST_IMAGE else 0,
            )
        )
        if point is not None and point.source is Source.SNAPSHOT:
            order.deploy.snapshot.snapshot_id = point.copy_id
            order.deploy.snapshot.manifest_sha256 = point.manifest_sha256
        self._models[order.order_id] = model.model_id
        return order

    def drop(self, model_id: ModelId, incarnation: int) -> worker_pb2.Order:
        """Forget the model."""
        order = self._order(incarnation)
        order.drop.model_id = model_id
        self._models[order.order_id] = model_id
        return order

    def swap(self, load: ModelId | None, evict: Sequence[ModelId], incarnation: int) -> worker_pb2.Order:
        """Change residency."""
        order = self._order(incarnation)
        order.swap_weights.CopyFrom(worker_pb2.SwapWeightsOrder(evict_model_ids=evict, load_model_id=load or ""))
        return order

    def prefetch(self, model_id: ModelId, incarnation: int) -> worker_pb2.Order:
        """Bring a parked state up, beside what runs."""
        order = self._order(incarnation)
        order.prefetch.CopyFrom(worker_pb2.PrefetchOrder(model_id=model_id, tier=types_pb2.TIER_DEVICE))
        return order

    def run(
        self,
        call: Call,
        spec: types_pb2.CallSpec,
        after_sequence: int,
        *,
        concurrent: bool = False,
        weights: worker_pb2.WeightSource | None = None,
    ) -> worker_pb2.Order:
        """Execute the call's current attempt, together with others or alone, with `weights` from elsewhere."""
        order = self._order(call.worker_incarnation)
        # In place: a message that is built apart is copied into its order.
        run = order.run_call
        run.call.call_id, run.call.attempt = call.call_id, call.attempt
        run.job_id, run.model_id = call.job_id, call.model_id
        run.sequence, run.after_sequence, run.weights_version = call.sequence, after_sequence, call.weights_version
        run.concurrent = concurrent
        if call.kind is CallKind.SAVE_CHECKPOINT:
            run.new_checkpoint_id = call.checkpoint_id or ""
        if weights is not None:
            run.weight_source.CopyFrom(weights)
        run.spec.CopyFrom(spec)
        return order

    def replay(
        self,
        model: Model,
        replay: Replay,
        place: int,
        spec: types_pb2.CallSpec,
        incarnation: int,
        weights: worker_pb2.WeightSource | None = None,
    ) -> worker_pb2.Order:
        """Execute a call again for its effect. The attempt is one that no earlier execution or recovery had."""
        call, order = replay.call, self._order(incarnation)
        order.run_call.CopyFrom(
            worker_pb2.RunCallOrder(
                call=registry_pb2.CallAttempt(call_id=call.call_id, attempt=call.attempt + model.recoveries),
                job_id=call.job_id,
                model_id=call.model_id,
                sequence=call.sequence,
                after_sequence=replay.after,
                through_sequence=replay.through,
                replay=True,
                weight_source=weights,
            )
        )
        order.run_call.spec.CopyFrom(spec)
        self._replays[order.order_id] = ReplayOrder(model.model_id, model.recoveries, place)
        return order

    def snapshot(self, snapshot: Snapshot, incarnation: int) -> worker_pb2.Order:
        """Write a snapshot."""
        order = self._order(incarnation)
        order.snapshot.model_id, order.snapshot.snapshot_id = snapshot.model_id, snapshot.snapshot_id
        self._snapshots[order.order_id] = snapshot
        return order

    def expire_snapshots(self, snapshot_ids: Sequence[str], incarnation: int) -> worker_pb2.Order:
        """Delete snapshots."""
        order = self._order(incarnation)
        order.expire_snapshots.snapshot_ids.extend(snapshot_ids)
        return order

    def give_way(self, call: Call) -> worker_pb2.Order:
        """Have the call's current attempt yield."""
        order = self._order(call.worker_incarnation)
        order.yield_call.call.CopyFrom(attempt_of(call))
        return order

    def abort(self, call: Call) -> worker_pb2.Order:
        """Stop the call's current attempt."""
        return self.stop(attempt_of(call), call.worker_incarnation)

    def stop(self, attempt: registry_pb2.CallAttempt, incarnation: int) -> worker_pb2.Order:
        """Stop an execution, whether or not there is a record of its call."""
        order = self._order(incarnation)
        order.abort.call.CopyFrom(attempt)
        return order

    def _order(self, incarnation: int) -> worker_pb2.Order:
        return worker_pb2.Order(order_id=next(self._numbers), leader_term=self.term, worker_incarnation=incarnation)


def attempt_of(call: Call) -> registry_pb2.CallAttempt:
    """The fence of a call's current execution."""
    return registry_pb2.CallAttempt(call_id=call.call_id, attempt=call.attempt)
