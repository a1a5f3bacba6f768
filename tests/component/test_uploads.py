"""An uploaded file stays while somebody needs it, and no longer."""

from collections.abc import AsyncIterator
from hashlib import sha256

import pytest

from plexrl.v1 import model_pb2, payload_pb2, types_pb2
from plexrl_controller.api.payloads import PayloadService
from plexrl_controller.dispatch import models, reaper
from plexrl_controller.dispatch.uploads import UPLOAD_HOLD_S
from plexrl_controller.domain.errors import FailedPrecondition, InvalidArgument
from plexrl_controller.domain.records import Job, Model
from plexrl_controller.domain.states import Role
from plexrl_controller.payloads.memory import MemoryPayloadStore
from plexrl_controller.store.memory import MemoryStore
from tests.support.leader import TENANT, Leader, act_as, running_leader

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


async def upload(leader: Leader) -> dict[str, str]:
    """Uploads the files of a base, as PutPayload does."""
    for content in FILES.values():
        payload = await leader.core.payloads.put(TENANT, content)
        await leader.core.uploads.uploaded(TENANT, payload, leader.clock.now())
    return {name: sha256(content).hexdigest() for name, content in FILES.items()}


async def model_of(leader: Leader, job: Job, payload_ids: dict[str, str], name: str = "policy") -> Model:
    base = model_pb2.ModelBase(bundle=model_pb2.BundleBase(payload_ids=payload_ids))
    spec = models.ModelSpec(name, base, model_pb2.MODEL_ROLE_POLICY, model_pb2.ModelSettings(), types_pb2.Affinity())
    model = await models.create_model(leader.core, leader.key("model"), job, spec)
    await leader.work()
    return leader.core.ledger.models[model.model_id]


async def pass_time(leader: Leader, seconds: float) -> None:
    leader.clock.time += seconds
    for facts in leader.core.ledger.facts.values():
        facts.lease_end = leader.clock.time + 60
    for group in leader.core.ledger.groups.values():
        group.last_sync = leader.clock.time
    await reaper.reap(leader.core)
    await leader.work()


async def test_an_upload_that_nobody_uses_is_kept_for_its_hour() -> None:
    async with running_leader() as leader:
        await leader.join()
        await upload(leader)
        await pass_time(leader, UPLOAD_HOLD_S - 10)
        assert leader.core.payloads.stored_bytes(TENANT) == 9
        await upload(leader)
        await pass_time(leader, UPLOAD_HOLD_S - 10)
        assert leader.core.payloads.stored_bytes(TENANT) == 9
        await pass_time(leader, 11)
        assert leader.core.payloads.stored_bytes(TENANT) == 0


@pytest.mark.parametrize(
    ("said", "came", "says"),
    [
        (b"weights", b"weightz", "want sha256"),
        (b"weights", b"weigh", "5 bytes came, want size_bytes = 7"),
        (b"weights", b"weights and more", "more bytes came"),
    ],
)
async def test_bytes_that_are_not_what_was_said_are_refused_and_not_kept(said: bytes, came: bytes, says: str) -> None:
    async def requests() -> AsyncIterator[payload_pb2.PutPayloadRequest]:
        yield payload_pb2.PutPayloadRequest(size_bytes=len(said), sha256=sha256(said).hexdigest())
        for start in range(0, len(came), 3):
            yield payload_pb2.PutPayloadRequest(data=came[start : start + 3])

    async with running_leader() as leader:
        await leader.join()
        act_as(Role.TENANT, TENANT)
        with pytest.raises(InvalidArgument, match=says):
            await PayloadService(leader.core).PutPayload(requests(), None)
        assert leader.core.payloads.stored_bytes(TENANT) == 0


@pytest.mark.parametrize("damaged", [False, True])
async def test_bytes_that_are_stored_need_not_come_again_unless_they_are_damaged(damaged: bool) -> None:
    came = 0

    async def requests() -> AsyncIterator[payload_pb2.PutPayloadRequest]:
        nonlocal came
        yield payload_pb2.PutPayloadRequest(size_bytes=7, sha256=sha256(b"weights").hexdigest())
        came += 1
        yield payload_pb2.PutPayloadRequest(data=b"weights")

    payloads = MemoryPayloadStore()
    async with running_leader(payloads=payloads) as leader:
        await leader.join()
        act_as(Role.TENANT, TENANT)
        service = PayloadService(leader.core)
        first = await service.PutPayload(requests(), None)
        await pass_time(leader, UPLOAD_HOLD_S - 10)
        if damaged:
            payloads.damage(TENANT, first.payload_id)
        assert await service.PutPayload(requests(), None) == first
        assert came == 1 + damaged
        stored = leader.core.payloads.find(TENANT, first.payload_id)
        assert await leader.core.payloads.read(TENANT, stored) == b"weights"
        # The hour begins anew, and no reference is left behind when it is over.
        await pass_time(leader, UPLOAD_HOLD_S - 10)
        assert leader.core.payloads.stored_bytes(TENANT) == 7
        await pass_time(leader, 11)
        assert leader.core.payloads.stored_bytes(TENANT) == 0


async def test_a_base_stays_while_a_model_has_it() -> None:
    async with running_leader() as leader:
        await leader.join()
        job = await leader.job()
        files = await upload(leader)
        first, second = await model_of(leader, job, files, "first"), await model_of(leader, job, files, "second")
        await pass_time(leader, UPLOAD_HOLD_S + 1)
        assert leader.core.payloads.stored_bytes(TENANT) == 9
        await models.delete_model(leader.core, first)
        await leader.work()
        await pass_time(leader, 1)
        assert leader.core.payloads.stored_bytes(TENANT) == 9
        await models.delete_model(leader.core, second)
        await leader.work()
        await pass_time(leader, 1)
        assert leader.core.payloads.stored_bytes(TENANT) == 0


async def test_a_file_that_is_not_stored_is_refused_with_what_to_do() -> None:
    async with running_leader() as leader:
        await leader.join()
        job = await leader.job()
        files = await upload(leader)
        with pytest.raises(FailedPrecondition, match="upload it again"):
            await model_of(leader, job, {**files, "tokenizer.json": "ab" * 32})
        await model_of(leader, job, files)


async def test_a_restart_forgets_no_upload_and_keeps_bases() -> None:
    store, payloads = MemoryStore(), MemoryPayloadStore()
    async with running_leader(store, payloads=payloads) as leader:
        await leader.join()
        files = await upload(leader)
        await leader.core.payloads.put(TENANT, b"nobody's")
    async with running_leader(store, payloads=payloads.restarted()) as leader:
        await leader.join()
        await model_of(leader, await leader.job("after"), files)
        await pass_time(leader, UPLOAD_HOLD_S + 1)
        assert leader.core.payloads.stored_bytes(TENANT) == 9
