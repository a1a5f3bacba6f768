"""A model on a simulated worker, and what its calls come to."""

from dataclasses import dataclass

from plexrl import wire
from plexrl.v1 import types_pb2, worker_pb2
from tests.simulation.faults.state import Copy, State

STATE_BYTES = 1000


@dataclass
class Deployed:
    """A model here: its state, where it is, and the copy that would survive the engine."""

    order: worker_pb2.DeployOrder
    state: State
    version: int
    applied: int
    image: Copy
    """What the host tier holds."""
    clean: bool = True
    """The host tier's copy is not older than the device's."""
    on_device: bool = False
    lost: bool = False

    def park(self) -> None:
        """Leaves the device."""
        if self.on_device:
            self.on_device, self.clean = False, True
            self.image = Copy(self.state, self.version, self.applied)


def follows(run: worker_pb2.RunCallOrder, held: Deployed) -> bool:
    """A lost state is loaded over whatever was applied to it, but never ahead of a call that was to come first."""
    return run.after_sequence == held.applied or (held.lost and run.after_sequence <= held.applied)


def result_of(run: worker_pb2.RunCallOrder, function: str, held: Deployed, number: int) -> types_pb2.CallResult:
    """What a call that was executed says; `number`: of the execution."""
    result, state = types_pb2.CallResult(), held.state
    match function:
        case "generate":
            made = types_pb2.GenerateResult(
                completions=wire.token_batch([[state.rollout, number]]), weights_version=held.version
            )
            result.generate.CopyFrom(made)
        case "score":
            result.score.logprobs.CopyFrom(wire.tensor([state.train, number], "float32"))
        case "forward_backward":
            result.forward_backward.loss, result.forward_backward.kl = state.train, number
        case "optim_step":
            result.optim_step.grad_norm = state.train * 2.0**28 + number
            result.optim_step.step = state.step
        case "sync_weights":
            result.sync_weights.weights_version = run.sequence
        case "save_checkpoint":
            saved = result.save_checkpoint.checkpoint
            saved.checkpoint_id, saved.label = run.new_checkpoint_id, run.spec.save_checkpoint.label
            saved.manifest_sha256, saved.step, saved.sequence = "0" * 64, state.step, run.sequence
        case "load_checkpoint":
            result.load_checkpoint.weights_version, result.load_checkpoint.step = run.sequence, state.step
            result.load_checkpoint.source_version = run.weight_source.weights_version
        case _:
            raise AssertionError(f"no result of {function}")
    return result


def failed(code: int, reason: str, **metadata: str) -> worker_pb2.OrderFinished:
    """An order that did not succeed."""
    info = wire.ErrorInfo(code, reason, f"the worker says {reason}", metadata)
    return worker_pb2.OrderFinished(error=wire.error_status(info))
