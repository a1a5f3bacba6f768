"""Policies, models that are sampled alone, and pulls between their workers, for tests of the worker alone."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from grpc import aio

from plexrl import wire
from plexrl.v1 import model_pb2 as m
from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl.v1 import worker_pb2 as w
from plexrl.v1 import worker_pb2_grpc
from tests.support.worker_daemon import METADATA, VOCAB_SIZE, Cluster, call, cluster, deploy, swap, train

WEIGHTS_BYTES = 4 * VOCAB_SIZE**2
ROLLOUT = "rollout_weights"


def greedy() -> t.CallSpec:
    """Completions that the weights alone decide."""
    sampling = t.SamplingParams(n=1, temperature=0.0, max_tokens=8, seed=1, logprobs=True)
    # What comes after these tokens is what `train` changes.
    return t.CallSpec(generate=t.GenerateSpec(prompts=wire.token_batch([[1], [2], [4]]), sampling=sampling))


async def sampled(c: Cluster, model_id: str, version: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of a model on the device, and their log-probabilities to the last bit."""
    report = await c.orders.ok(run_call=call(model_id, greedy(), weights_version=version))
    result = report.finished.result.generate
    assert result.weights_version == version
    return wire.batch_arrays(result.completions)[0].tolist(), wire.float32s(result.logprobs).tolist()


async def policy(c: Cluster, model_id: str = "policy", *, steps: int = 2, **fields: Any) -> int:
    """A policy on the device whose rollout weights the device alone has; returns their version."""
    await c.orders.ok(deploy=deploy(model_id, role=m.MODEL_ROLE_POLICY, **fields))
    await c.orders.ok(swap_weights=swap(model_id))
    return await train(c.orders, model_id, 1, steps)


async def rollouts(c: Cluster, model_id: str = "rollouts", **fields: Any) -> None:
    """A model that is sampled alone, parked; its own weights are others than the policy's."""
    await c.orders.ok(deploy=deploy(model_id, role=m.MODEL_ROLE_ROLLOUT, **({"seed": 9} | fields)))


def pull(
    address: str, version: int, sequence: int = 1, model_id: str = "rollouts", source: str = "policy", **fields: Any
) -> w.RunCallOrder:
    """The order to load a version of another model's rollout weights from a worker."""
    spec = t.LoadCheckpointSpec(rollout=t.RolloutSource(model_id=source))
    weights = w.WeightSource(address=address, model_id=source, weights_version=version)
    return call(model_id, t.CallSpec(load_checkpoint=spec), sequence, weight_source=weights, **fields)


def at(c: Cluster) -> str:
    """Where it is called."""
    return c.daemon.server.address


@contextlib.asynccontextmanager
async def two(directory: Path, **changes: Any) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """A worker to train on and one to sample on."""
    async with (
        cluster(directory / "trainer", name="trainer", **changes) as trainer,
        cluster(directory / "sampler", name="sampler") as sampler,
    ):
        yield trainer, sampler


async def held(c: Cluster, model_id: str) -> r.DeploymentStatus:
    """What a worker says of a model."""
    return next(d for d in (await c.status()).deployments if d.model_id == model_id)


def stream(channel: aio.Channel, model_id: str, version: int, metadata: Any = METADATA) -> Any:
    """A pull, not read yet."""
    request = w.PullRequest(model_id=model_id, weights_version=version)
    return worker_pb2_grpc.WeightServiceStub(channel).Pull(request, metadata=metadata)


async def parts_of(stream: Any) -> list[w.PullResponse]:
    """All that a pull gives."""
    return [part async for part in stream]
