"""A client's rollouts: a model of role rollout that takes its policy's weights, and is sampled with them.

The client decides when; what must be true of the answers is `truth`'s business, as for the rest.
"""

import asyncio
import random
from typing import TYPE_CHECKING

from plexrl.v1 import model_pb2
from tests.simulation.faults.truth import ModelTruth, Request

if TYPE_CHECKING:
    from tests.simulation.faults.client import Client

PROBES = 6


class Rollouts:
    """The rollouts of one client, if it has any. Draws of their own, so that what else it does is as without them."""

    def __init__(self, client: "Client", seed: int) -> None:
        self._client = client
        self._rng = random.Random(f"{seed}-rollouts")
        self._wanted = self._rng.random() < 0.4
        self.next: dict[str, int] = {}
        """By model, as the client's own."""
        self.policy_of: dict[str, str] = {}

    def adopt(self, policy_id: str, model_id: str, next_sequence: int, seed: int) -> None:
        """Goes on with rollouts that are there."""
        job = self._client.job
        assert job is not None
        self.next[model_id], self.policy_of[model_id] = next_sequence, policy_id
        job.models.setdefault(model_id, ModelTruth(model_id, seed, samples=policy_id))

    async def create(self, base: model_pb2.ModelBase, policy_id: str) -> None:
        """Creates the model, the same one whoever asks again."""
        client, job = self._client, self._client.job
        assert job is not None
        if not self._wanted or self.next:
            return
        request = model_pb2.CreateModelRequest(
            request_id=f"{client.name}-rollouts",
            job_id=job.job_id,
            name="rollouts",
            base=base,
            role=model_pb2.MODEL_ROLE_ROLLOUT,
        )
        model = await client._ask("ModelService", "CreateModel", request)
        self.adopt(policy_id, model.model_id, 1, base.init.seed)

    async def play(self) -> None:
        """A round of them, now and then."""
        client = self._client
        for model_id in self.next:
            if self._rng.random() < 0.5:
                continue
            if model_id in client.broken:
                await self._mend(model_id)
            policy_id = self.policy_of[model_id]
            requests = [client._request(model_id, "pull")] if self._rng.random() < 0.6 else []
            if requests and policy_id not in client.broken and self._rng.random() < 0.5:
                # The usual round, and the next version on its heels.
                made = [client._request(policy_id, name) for name in ("optim_step", "sync_weights")]
                later = [client._request(policy_id, name) for name in ("optim_step", "sync_weights")]
                requests = [*made, *requests, *later]
            requests += [client._request(model_id, "generate") for _ in range(self._rng.randint(0, 3))]
            way = client._way()
            await client._send_all(requests, way)
            if self._rng.random() < 0.6:
                await client._outcomes(requests, way)

    async def probe(self) -> None:
        """They work once nothing fails any more: a pull, and a generate with what it brought."""
        client = self._client
        for model_id in self.next:
            tried: list[Request] = []
            for _ in range(PROBES):
                await self._mend(model_id)
                tried = [client._request(model_id, "pull"), client._request(model_id, "generate")]
                for request in tried:
                    await client._submit(request)
                await client._outcomes(tried, "poll")
                if all(request.outcome is not None and request.outcome.succeeded for request in tried):
                    break
                await asyncio.sleep(client.lease_s)
            else:
                ends = [(request.name, request.outcome, request.rejected) for request in tried]
                client.world.blame(f"nothing fails any more, and rollouts end so: {ends}")

    async def _mend(self, model_id: str) -> None:
        """Makes the model take pulls again."""
        client = self._client
        policy_id = self.policy_of[model_id]
        while model_id in client.broken:
            policy = await client._ask("ModelService", "GetModel", model_pb2.GetModelRequest(model_id=policy_id))
            if policy.state == model_pb2.MODEL_STATE_STATE_LOST:
                client.broken.add(policy_id)
            if policy_id in client.broken:
                await client._mend(policy_id)
            model = await client._ask("ModelService", "GetModel", model_pb2.GetModelRequest(model_id=model_id))
            if model.state != model_pb2.MODEL_STATE_STATE_LOST:
                await client._resume(model_id)
                continue
            self.next[model_id] = model.next_sequence
            pull = client._request(model_id, "pull")
            await client._submit(pull)
            await client._outcomes([pull], "poll")
            if pull.outcome is not None and pull.outcome.succeeded:
                client.broken.discard(model_id)
