"""What every store does: memory and Postgres answer alike."""

from dataclasses import replace
from typing import Any

import pytest

from plexrl_controller.domain.errors import ControllerError, InvalidArgument, LeadershipLost
from plexrl_controller.domain.ids import CallId, CheckpointId, JobId, ModelId, SessionId, Tenant
from plexrl_controller.domain.records import Payload, Record
from plexrl_controller.domain.states import CallKind, CallState, IntervalKind, JobState, ModelState, SessionState
from plexrl_controller.store.port import Account, Changes, LiveState, Page, Store, Tombstone
from tests.store.records import (
    T0,
    TENANT,
    make_call,
    make_checkpoint,
    make_event,
    make_interval,
    make_job,
    make_model,
    make_request,
    make_session,
    make_snapshot,
    make_token,
    make_worker,
)

OTHER = Tenant("other")


async def seeded(store: Store, *records: Record) -> int:
    """A store with a job, its model and `records`; returns the term."""
    term = await store.acquire_term("leader-1")
    await store.commit(term, Changes(inserts=(make_job(), make_model(), *records)))
    return term


class TestTerms:
    async def test_each_term_is_higher_than_the_last(self, store: Store) -> None:
        terms = [await store.acquire_term(f"leader-{number}") for number in range(3)]
        assert terms == sorted(set(terms))

    async def test_an_older_term_can_no_longer_write(self, store: Store) -> None:
        """G20: a controller that was replaced, and does not know it, changes nothing."""
        term = await seeded(store)
        newer = await store.acquire_term("leader-2")
        with pytest.raises(LeadershipLost, match=f"newest is {newer}"):
            await store.commit(term, Changes(inserts=(make_worker(),)))
        with pytest.raises(LeadershipLost, match=f"newest is {newer}"):
            await store.commit(term, Changes(commit_id="asks whether it leads"))
        assert (await store.load()).workers == ()
        await store.commit(newer, Changes(inserts=(make_worker(),)))
        await store.commit(newer, Changes(commit_id="asks whether it leads"))

    async def test_nobody_writes_before_the_first_term(self, store: Store) -> None:
        with pytest.raises(LeadershipLost):
            await store.commit(1, Changes(inserts=(make_worker(),)))


class TestRecords:
    async def test_every_field_comes_back(self, store: Store) -> None:
        term = await store.acquire_term("leader-1")
        inserts = (
            make_job(), make_model(), make_call(), make_session(), make_worker(), make_checkpoint(), make_snapshot(),
            make_token(),
        )  # fmt: skip
        await store.commit(term, Changes(inserts=inserts, requests=(make_request(),)))
        assert await store.load() == LiveState(
            jobs=(make_job(),),
            models=(make_model(),),
            calls=(make_call(),),
            sessions=(make_session(),),
            workers=(make_worker(),),
            checkpoints=(make_checkpoint(),),
            snapshots=(make_snapshot(),),
            tokens=(make_token(),),
            requests=(make_request(),),
        )
        assert await store.tokens() == (make_token(),)
        assert await store.get_job(JobId("job-1")) == make_job()
        assert await store.get_model(ModelId("model-1")) == make_model()
        assert await store.get_call(CallId("call-1")) == make_call()
        assert await store.get_checkpoint(CheckpointId("checkpoint-1")) == make_checkpoint()
        assert await store.get_session(SessionId("session-1")) == make_session()

    async def test_every_field_may_be_absent(self, store: Store) -> None:
        call = make_call(
            spec=None,
            error=None,
            result=None,
            worker_id=None,
            checkpoint_id=None,
            start_time=None,
            end_time=None,
            session_id=None,
        )
        model = make_model(2, worker_id=None)
        await seeded(store, call, model, make_token(tenant=None))
        assert await store.get_call(call.call_id) == call
        assert await store.get_model(model.model_id) == model
        assert (await store.load()).tokens == (make_token(tenant=None),)

    async def test_unknown_ids_are_none(self, store: Store) -> None:
        await seeded(store)
        assert await store.get_job(JobId("job-9")) is None
        assert await store.get_model(ModelId("model-9")) is None
        assert await store.get_call(CallId("call-9")) is None
        assert await store.get_checkpoint(CheckpointId("checkpoint-9")) is None
        assert await store.get_session(SessionId("session-9")) is None

    @pytest.mark.parametrize(
        ("record", "changes"),
        [
            (make_job(), {"state": JobState.FAILED, "labels": {}, "end_time": T0, "client_state": b"", "weight": 1.0}),
            (make_model(), {"state": ModelState.STATE_LOST, "worker_id": None, "due_sequence": 12, "message": "gone"}),
            (make_call(), {"state": CallState.SUCCEEDED, "result": Payload("12" * 32, 3, b"out"), "end_time": T0 + 9}),
            (make_call(), {"acknowledged": True, "spec": None, "result": None, "error": None}),
            (make_session(), {"state": SessionState.CLOSED, "end_time": T0 + 7}),
            (make_worker(), {"incarnation": 3, "life_nonce": 7, "labels": {"zone": "b"}, "address": "127.0.0.1:1"}),
            (make_checkpoint(), {"label": "final"}),
            (make_snapshot(), {"committed": False, "sequence": 12, "step": 6, "manifest_sha256": "", "size_bytes": 0}),
            (make_token(), {"revoked": True}),
        ],
        ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "-".join(sorted(value)),
    )
    async def test_an_update_writes_what_may_change(self, store: Store, record: Any, changes: dict[str, Any]) -> None:
        term = await seeded(
            store, make_call(), make_session(), make_worker(), make_checkpoint(), make_snapshot(), make_token()
        )
        changed = replace(record, revision=2, **changes)
        await store.commit(term, Changes(updates=(changed,)))
        state = await store.load()
        by_type = {
            "Job": await store.get_job(JobId("job-1")),
            "Model": await store.get_model(ModelId("model-1")),
            "Call": await store.get_call(CallId("call-1")),
            "Session": await store.get_session(SessionId("session-1")),
            "Worker": state.workers[0],
            "Checkpoint": await store.get_checkpoint(CheckpointId("checkpoint-1")),
            "Snapshot": state.snapshots[0],
            "Token": state.tokens[0],
        }
        assert by_type[type(record).__name__] == changed

    async def test_the_spec_stays_through_transitions(self, store: Store) -> None:
        call = make_call(spec=Payload("ab" * 32, 50_000, b"\x01" * 50_000))
        term = await seeded(store, call)
        for revision, state in enumerate((CallState.DISPATCHED, CallState.RUNNING, CallState.SUCCEEDED), start=2):
            call = replace(call, state=state, revision=revision)
            await store.commit(term, Changes(updates=(call,)))
        assert await store.get_call(call.call_id) == call


class TestCommit:
    async def test_several_revisions_become_the_last_one(self, store: Store) -> None:
        term = await seeded(store, make_call())
        revisions = tuple(make_call(revision=number, attempt=number) for number in (2, 3, 4))
        new = tuple(make_call(2, revision=number, attempt=number) for number in (1, 2))
        events = tuple(make_event("call-1", at=T0 + number) for number in (2, 3, 4))
        await store.commit(term, Changes(inserts=new[:1], updates=(*revisions, *new[1:]), events=events))
        assert (await store.load()).calls == (revisions[-1], new[-1])
        assert await store.events("call-1") == events

    @pytest.mark.parametrize("revision", [1, 3, 7])
    async def test_a_change_from_another_revision_is_lost_leadership(self, store: Store, revision: int) -> None:
        term = await seeded(store, make_call(), make_call(2))
        good = make_call(2, revision=2, attempt=9)
        with pytest.raises(LeadershipLost):
            await store.commit(
                term,
                Changes(updates=(good, make_call(revision=revision)), events=(make_event("call-2"),)),
            )
        assert (await store.load()).calls == (make_call(), make_call(2))
        assert await store.events("call-2") == ()

    async def test_a_change_of_an_unknown_record_is_lost_leadership(self, store: Store) -> None:
        term = await seeded(store)
        with pytest.raises(LeadershipLost):
            await store.commit(term, Changes(updates=(make_call(revision=2),)))

    @pytest.mark.parametrize(
        "taken",
        [
            make_call(),
            make_call(9, request_id="request-1"),
            make_call(9, sequence=1),
            make_job(9, name=make_job().name),
            make_model(9, name=make_model().name),
            make_token(9, token_sha256=make_token().token_sha256),
        ],
        ids=["call id", "request id", "sequence", "job name", "model name", "token hash"],
    )
    async def test_what_is_taken_is_lost_leadership(self, store: Store, taken: Record) -> None:
        term = await seeded(store, make_call(), make_token())
        with pytest.raises(LeadershipLost):
            await store.commit(term, Changes(inserts=(taken, make_worker())))
        assert (await store.load()).workers == ()

    async def test_a_taken_request_key_is_lost_leadership(self, store: Store) -> None:
        term = await seeded(store)
        await store.commit(term, Changes(requests=(make_request(), make_request(1, "acme/job-1"))))
        with pytest.raises(LeadershipLost):
            await store.commit(term, Changes(requests=(make_request(),)))

    async def test_generates_have_no_place_in_the_sequence(self, store: Store) -> None:
        await seeded(store, *(make_call(number, kind=CallKind.GENERATE, sequence=0) for number in (1, 2)))
        assert len((await store.load()).calls) == 2

    async def test_names_are_free_again_after_the_end(self, store: Store) -> None:
        term = await seeded(store)
        await store.commit(
            term,
            Changes(
                updates=(
                    make_job(state=JobState.FINISHED, revision=2),
                    make_model(state=ModelState.DELETED, revision=2),
                ),
                inserts=(make_job(2, name=make_job().name), make_model(2, name=make_model().name)),
            ),
        )
        state = await store.load()
        assert [job.job_id for job in state.jobs] == ["job-2"]
        assert [model.model_id for model in state.models] == ["model-2"]

    @pytest.mark.parametrize(
        "changes",
        [
            Changes(updates=(make_call(revision=2), make_call(revision=4))),
            Changes(inserts=(make_call(2), make_call(2))),
            Changes(inserts=(make_call(2),), updates=(make_call(2, revision=2, tenant=OTHER),)),
            Changes(updates=(make_call(revision=2), make_call(revision=3, spec=Payload("00" * 32, 1, b"x")))),
            Changes(inserts=(make_model(2, job=9),)),
            Changes(inserts=(make_call(2, model=9),)),
            Changes(inserts=(make_checkpoint(1, model=9),)),
        ],
        ids=["gap", "twice", "fixed field", "other spec", "no job", "no model", "checkpoint of no model"],
    )
    async def test_changes_that_make_no_sense_are_refused(self, store: Store, changes: Changes) -> None:
        term = await seeded(store, make_call())
        with pytest.raises(ControllerError) as refused:
            await store.commit(term, changes)
        assert not isinstance(refused.value, LeadershipLost)
        assert (await store.load()).calls == (make_call(),)

    async def test_a_repeated_commit_is_recognised(self, store: Store) -> None:
        term = await seeded(store, make_call())
        changes = Changes(
            inserts=(make_call(2),),
            updates=(make_call(revision=2),),
            events=(make_event("call-1"),),
            intervals=(make_interval(T0),),
            requests=(make_request(),),
            commit_id="commit-7",
        )
        await store.commit(term, changes)
        await store.commit(term, changes)
        assert await store.events("call-1") == (make_event("call-1"),)
        assert [batch async for batch in store.intervals(None, None, 0)] == [(make_interval(T0),)]

    async def test_a_repeated_commit_of_an_older_leader_is_refused(self, store: Store) -> None:
        term = await seeded(store)
        changes = Changes(inserts=(make_worker(),), commit_id="commit-7")
        await store.commit(term, changes)
        await store.acquire_term("leader-2")
        with pytest.raises(LeadershipLost):
            await store.commit(term, changes)

    async def test_an_empty_commit_still_proves_leadership(self, store: Store) -> None:
        term = await seeded(store)
        await store.commit(term, Changes())
        await store.acquire_term("leader-2")
        with pytest.raises(LeadershipLost):
            await store.commit(term, Changes())


class TestLoad:
    async def test_ended_jobs_leave_only_what_still_has_to_end(self, store: Store) -> None:
        ended = make_job(2, state=JobState.FINISHED)
        await seeded(
            store,
            ended,
            make_model(2, job=2, state=ModelState.DELETED),
            make_model(3, job=2, state=ModelState.DELETING, name="leaving"),
            make_checkpoint(1),
            make_checkpoint(2, model=2),
            make_snapshot(1),
            make_snapshot(2, model=2),
            make_call(1, state=CallState.SUCCEEDED),
            make_call(2, state=CallState.SUCCEEDED, acknowledged=True),
            make_call(3, state=CallState.RUNNING),
            make_call(4, job=2, model=2, state=CallState.FAILED),
            make_call(5, job=2, model=2, state=CallState.FAILED, acknowledged=True),
            make_call(6, job=2, model=3, state=CallState.CANCELLING),
            make_call(7, state=CallState.SUCCEEDED, acknowledged=True, spec=None),
        )
        state = await store.load()
        assert [job.job_id for job in state.jobs] == ["job-1"]
        assert [model.model_id for model in state.models] == ["model-1", "model-3"]
        assert [call.call_id for call in state.calls] == ["call-1", "call-3", "call-6"]
        assert state.tombstones == tuple(
            Tombstone(JobId("job-1"), make_call(number).request_id, f"hash-{number}", CallId(f"call-{number}"))
            for number in (2, 7)
        )
        assert [call.call_id for call in state.logged_calls] == ["call-2"], "only what can still be replayed"
        assert [snapshot.snapshot_id for snapshot in state.snapshots] == ["snapshot-1"]
        assert [checkpoint.checkpoint_id for checkpoint in state.checkpoints] == ["checkpoint-1"]

    async def test_accounts_sum_device_time_of_live_jobs(self, store: Store) -> None:
        term = await seeded(store, make_job(2, state=JobState.FINISHED), make_job(3))
        await store.commit(
            term,
            Changes(
                intervals=(
                    make_interval(T0, 2.0, IntervalKind.BUSY),
                    make_interval(T0 + 2, 0.5, IntervalKind.BUSY),
                    make_interval(T0 + 3, 0.25, IntervalKind.SWAP_IN),
                    make_interval(T0 + 4, 0.25, IntervalKind.SWAP_IN),
                    make_interval(T0 + 5, 1.0, IntervalKind.HOLD),
                    make_interval(T0, 9.0, IntervalKind.BUSY, job=2),
                )
            ),
        )
        accounts = (await store.load()).accounts
        assert accounts == (Account(JobId("job-1"), busy_s=2.5, swap_s=0.5, hold_s=1.0, swaps=2),)

    async def test_accounts_of_jobs_that_ended_can_be_read(self, store: Store) -> None:
        ended, idle = make_job(2, state=JobState.FINISHED), make_job(3)
        done = [make_call(n, state=CallState.SUCCEEDED, end_time=T0 + 1) for n in (1, 2)]
        term = await seeded(store, ended, idle, *done, make_call(3))
        await store.commit(term, Changes(intervals=(make_interval(T0, 9.0, IntervalKind.BUSY, job=2),)))
        assert await store.accounts([JobId("job-1"), JobId("job-2"), JobId("job-3"), JobId("nobody")]) == {
            "job-1": Account(JobId("job-1"), calls=2),
            "job-2": Account(JobId("job-2"), busy_s=9.0),
        }
        assert await store.accounts([]) == {}
        assert (await store.load()).accounts == (Account(JobId("job-1"), calls=2),)


class TestListings:
    async def test_pages_join_up_newest_first(self, store: Store) -> None:
        same_time = [make_call(number, create_time=T0 + number // 3) for number in range(1, 10)]
        await seeded(store, *same_time)
        seen: list[CallId] = []
        after = None
        while True:
            listing = await store.list_calls(None, None, Page(4, after))
            seen += [call.call_id for call in listing.items]
            if (after := listing.next) is None:
                break
            assert len(listing.items) == 4
        assert seen == [f"call-{number}" for number in range(9, 0, -1)]

    async def test_a_page_that_is_just_full_is_the_last(self, store: Store) -> None:
        await seeded(store, make_call(1), make_call(2))
        listing = await store.list_calls(None, None, Page(2))
        assert (len(listing.items), listing.next) == (2, None)

    async def test_calls_are_listed_without_bulk(self, store: Store) -> None:
        await seeded(store, make_call())
        listing = await store.list_calls(None, None, Page())
        assert listing.items == (make_call(spec=None, result=None),)

    async def test_calls_are_filtered(self, store: Store) -> None:
        await seeded(
            store,
            make_job(2, tenant=OTHER),
            make_model(2, job=2, tenant=OTHER),
            make_call(1, state=CallState.SUCCEEDED),
            make_call(2),
            make_call(3, job=2, model=2, tenant=OTHER),
            make_call(4, job=2, model=2, tenant=OTHER, state=CallState.EXPIRED),
        )

        async def ids(tenant: Tenant | None, job_id: str | None) -> list[str]:
            listing = await store.list_calls(tenant, JobId(job_id) if job_id else None, Page())
            return [call.call_id for call in listing.items]

        assert await ids(None, None) == ["call-4", "call-3", "call-2", "call-1"]
        assert await ids(OTHER, None) == ["call-4", "call-3"]
        assert await ids(None, "job-1") == ["call-2", "call-1"]
        assert await ids(TENANT, "job-2") == []

    async def test_jobs_are_filtered(self, store: Store) -> None:
        await seeded(store, make_job(2, tenant=OTHER), make_job(3, state=JobState.EXPIRED))

        async def ids(tenant: Tenant | None, live_only: bool) -> list[str]:
            return [job.job_id for job in (await store.list_jobs(tenant, live_only, Page())).items]

        assert await ids(None, False) == ["job-3", "job-2", "job-1"]
        assert await ids(None, True) == ["job-2", "job-1"]
        assert await ids(TENANT, False) == ["job-3", "job-1"]
        assert await ids(TENANT, True) == ["job-1"]

    @pytest.mark.parametrize(
        "page",
        [
            Page(0),
            Page(-1),
            Page(1001),
            Page(10, ""),
            Page(10, "not a cursor"),
            Page(10, "é"),
            Page(10, "MS4w"),
            Page(10, "bmFuL2E="),
            Page(10, "MS4wLwA="),
            Page(10, "/w=="),
            Page(10, "A" * 10_000),
        ],
    )
    async def test_a_bad_page_is_an_invalid_argument(self, store: Store, page: Page) -> None:
        await seeded(store)
        with pytest.raises(InvalidArgument):
            await store.list_jobs(None, False, page)
        with pytest.raises(InvalidArgument):
            await store.list_calls(None, None, page)

    async def test_checkpoints_of_a_model_newest_first(self, store: Store) -> None:
        await seeded(store, make_model(2), *(make_checkpoint(number) for number in (1, 2, 3)), make_checkpoint(4, 2))
        listed = await store.list_checkpoints(ModelId("model-1"))
        assert [checkpoint.checkpoint_id for checkpoint in listed] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]

    async def test_intervals_come_in_the_order_of_their_ends(self, store: Store) -> None:
        term = await seeded(store, make_job(2, tenant=OTHER))
        late, early, others = make_interval(T0 + 20), make_interval(T0), make_interval(T0 + 10, job=2)
        nobodys = make_interval(T0 + 30, call_id=None, call_kind=None)
        await store.commit(term, Changes(intervals=(late, early, others, nobodys)))

        async def read(tenant: Tenant | None, job_id: str | None, since_s: float) -> list[Any]:
            batches = store.intervals(tenant, JobId(job_id) if job_id else None, int(since_s * 1e9))
            return [interval async for batch in batches for interval in batch]

        assert await read(None, None, 0) == [early, others, late, nobodys]
        assert await read(None, None, T0 + 1) == [others, late, nobodys]
        assert await read(OTHER, None, 0) == [others]
        assert await read(TENANT, "job-1", T0 + 5) == [late, nobodys]
        assert await read(TENANT, "job-2", 0) == []

    async def test_intervals_come_in_batches(self, store: Store) -> None:
        term = await seeded(store)
        many = tuple(make_interval(T0 + number // 7) for number in range(2500))
        await store.commit(term, Changes(intervals=many))
        batches = [batch async for batch in store.intervals(None, None, 0)]
        assert [len(batch) for batch in batches] == [1000, 1000, 500]
        assert tuple(interval for batch in batches for interval in batch) == many

    async def test_events_of_a_record_oldest_first(self, store: Store) -> None:
        term = await seeded(store)
        events = tuple(make_event(f"call-{number % 2}", at=T0 - number) for number in range(6))
        await store.commit(term, Changes(events=events[:3]))
        await store.commit(term, Changes(events=(*events[3:], replace(events[0], source=None))))
        assert await store.events("call-1") == events[1::2]
        assert await store.events("call-0") == (*events[::2], replace(events[0], source=None))
        assert await store.events("call-9") == ()
