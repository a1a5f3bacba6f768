"""Orders, written from records."""

from collections.abc import Sequence
from itertools import count

from plexrl.v1 import model_pb2, registry_pb2, types_pb2, worker_pb2
from plexrl_controller.dispatch.ledger import RESTORE_BASE
from plexrl_controller.domain.ids import ModelId
from plexrl_controller.domain.records import Call, Model
from plexrl_controller.domain.states import CallKind


class OrderBook:
    """Numbers orders within a term and remembers those whose report does not name a call."""

    def __init__(self, term: int) -> None:
        self.term = term
        self._numbers = count(1)
        self._models: dict[int, ModelId] = {}
        self._swaps: set[int] = set()

    def model_of(self, order_id: int) -> ModelId | None:
        """The model of a deploy or drop order that has not been settled; asking settles it."""
        return self._models.pop(order_id, None)

    def was_swap(self, order_id: int) -> bool:
        """Whether an order that has not been settled is a residency change; asking settles it."""
        known = order_id in self._swaps
        self._swaps.discard(order_id)
        return known

    def deploy(self, model: Model, incarnation: int) -> worker_pb2.Order:
        """Build the model, or restore it from the checkpoint that holds its state."""
        restore = model.restore_checkpoint_id
        order = self._order(incarnation)
        order.deploy.CopyFrom(
            worker_pb2.DeployOrder(
                model_id=model.model_id,
                job_id=model.job_id,
                base=model_pb2.ModelBase.FromString(model.base),
                role=model_pb2.ModelRole.ValueType(model.role),
                settings=model_pb2.ModelSettings.FromString(model.settings),
                checkpoint_id="" if restore in (None, RESTORE_BASE) else restore,
                applied_sequence=model.applied_sequence,
                weights_version=model.weights_version,
            )
        )
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
        self._swaps.add(order.order_id)
        return order

    def prefetch(self, model_id: ModelId, incarnation: int) -> worker_pb2.Order:
        """Bring a parked state up, beside what runs."""
        order = self._order(incarnation)
        order.prefetch.CopyFrom(worker_pb2.PrefetchOrder(model_id=model_id, tier=types_pb2.TIER_DEVICE))
        return order

    def run(self, call: Call, spec: types_pb2.CallSpec, after_sequence: int) -> worker_pb2.Order:
        """Execute the call's current attempt."""
        order = self._order(call.worker_incarnation)
        order.run_call.CopyFrom(
            worker_pb2.RunCallOrder(
                call=attempt_of(call),
                job_id=call.job_id,
                model_id=call.model_id,
                sequence=call.sequence,
                after_sequence=after_sequence,
                weights_version=call.weights_version,
                new_checkpoint_id=(call.checkpoint_id or "") if call.kind is CallKind.SAVE_CHECKPOINT else "",
            )
        )
        order.run_call.spec.CopyFrom(spec)
        return order

    def abort(self, call: Call) -> worker_pb2.Order:
        """Stop the call's current attempt."""
        order = self._order(call.worker_incarnation)
        order.abort.call.CopyFrom(attempt_of(call))
        return order

    def _order(self, incarnation: int) -> worker_pb2.Order:
        return worker_pb2.Order(order_id=next(self._numbers), leader_term=self.term, worker_incarnation=incarnation)


def attempt_of(call: Call) -> registry_pb2.CallAttempt:
    """The fence of a call's current execution."""
    return registry_pb2.CallAttempt(call_id=call.call_id, attempt=call.attempt)
