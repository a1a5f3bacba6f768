"""Calls of a controller in memory: what each comes to unless a test says otherwise, and errors in the wire's form."""

from collections.abc import Callable

from google.rpc import status_pb2

from plexrl.v1 import call_pb2
from plexrl.v1 import types_pb2 as t
from plexrl.wire import ErrorInfo, batch_arrays, error_status, tensor, token_batch

Execute = Callable[[call_pb2.SubmitCallRequest], t.CallResult | status_pb2.Status]
Refuse = Callable[[call_pb2.SubmitCallRequest], status_pb2.Status | None]

TERMINAL = {t.CALL_STATE_SUCCEEDED, t.CALL_STATE_FAILED, t.CALL_STATE_CANCELLED, t.CALL_STATE_EXPIRED}


def status(code: int, reason: str, message: str) -> status_pb2.Status:
    return error_status(ErrorInfo(code, reason, message))


def echo(submit: call_pb2.SubmitCallRequest) -> t.CallResult | status_pb2.Status:
    """A result of the right shape for every function: generate returns each prompt n times."""
    spec = submit.spec
    match spec.WhichOneof("function"):
        case "generate":
            token_ids, lengths = batch_arrays(spec.generate.prompts)
            prompts, start = [], 0
            for length in lengths:
                prompts.append(token_ids[start : start + length])
                start += length
            completions = token_batch([p for p in prompts for _ in range(spec.generate.sampling.n)])
            count, _ = batch_arrays(completions)
            return t.CallResult(
                generate=t.GenerateResult(
                    completions=completions,
                    logprobs=tensor([-0.5] * count.size, "float32"),
                    finish_reasons=[t.FINISH_REASON_STOP] * (len(prompts) * spec.generate.sampling.n),
                    weights_version=spec.generate.version.exact,
                )
            )
        case "score":
            token_ids, _ = batch_arrays(spec.score.batch)
            return t.CallResult(score=t.ScoreResult(logprobs=tensor([-1.0] * token_ids.size, "float32")))
        case "forward_backward":
            token_ids, _ = batch_arrays(spec.forward_backward.batch)
            logprobs = tensor([-2.0] * token_ids.size, "float32")
            return t.CallResult(forward_backward=t.ForwardBackwardResult(loss=0.25, token_count=3, logprobs=logprobs))
        case "optim_step":
            return t.CallResult(optim_step=t.OptimStepResult(grad_norm=1.5, step=submit.sequence))
        case "sync_weights":
            return t.CallResult(sync_weights=t.SyncWeightsResult(weights_version=submit.sequence))
        case "save_checkpoint":
            checkpoint = t.Checkpoint(
                checkpoint_id=f"checkpoint-{submit.sequence}",
                label=spec.save_checkpoint.label,
                sequence=submit.sequence,
            )
            return t.CallResult(save_checkpoint=t.SaveCheckpointResult(checkpoint=checkpoint))
        case _:
            return t.CallResult(load_checkpoint=t.LoadCheckpointResult(weights_version=submit.sequence, step=0))


def copy_of(call: call_pb2.Call) -> call_pb2.Call:
    copy = call_pb2.Call()
    copy.CopyFrom(call)
    return copy
