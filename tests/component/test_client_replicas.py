"""Rollouts over replicas against a controller in memory, whose model samples by rote: who is asked for what, and that
what comes of it is what one model would have said.
"""

import threading
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from google.rpc import code_pb2, status_pb2

import plexrl
from plexrl.cluster import Cluster
from plexrl.job import Job
from plexrl.v1 import call_pb2, session_pb2
from plexrl.v1 import types_pb2 as t
from plexrl.wire import batch_arrays, split, tensor, token_batch
from tests.support.client import cluster_fixture, controller_fixture  # noqa: F401
from tests.support.fake_calls import status
from tests.support.fake_controller import FakeController

BASE = plexrl.Init({"architectures": ["Qwen3ForCausalLM"]})
STOP = 3


class ByRote:
    """Every token follows from all before it, so that it is the same wherever a sequence is cut. A pull gives the
    policy's version.
    """

    def __init__(self) -> None:
        self.policy_version = 6

    def __call__(self, submit: call_pb2.SubmitCallRequest) -> t.CallResult | status_pb2.Status:
        spec = submit.spec
        if spec.WhichOneof("function") == "load_checkpoint":
            pulled = t.LoadCheckpointResult(weights_version=submit.sequence, source_version=self.policy_version)
            return t.CallResult(load_checkpoint=pulled)
        sampling = spec.generate.sampling
        prompts = [prompt.tolist() for prompt in split(*batch_arrays(spec.generate.prompts))]
        whole = [_said(p, sampling.max_tokens) for p in prompts for _ in range(sampling.n)]
        steps = sorted(map(len, whole))[-1 - sampling.leave]
        rows = [ids[:steps] for ids in whole]
        reasons = [
            t.FINISH_REASON_UNFINISHED
            if len(ids) > steps
            else t.FINISH_REASON_STOP
            if ids[-1] == STOP
            else t.FINISH_REASON_LENGTH
            for ids in whole
        ]
        scores = [-float(token) for ids in rows for token in ids] if sampling.logprobs else []
        return t.CallResult(
            generate=t.GenerateResult(
                completions=token_batch(rows),
                logprobs=tensor(scores, "float32"),
                finish_reasons=reasons,
                weights_version=spec.generate.version.exact,
            )
        )


def _said(prompt: list[int], max_tokens: int) -> list[int]:
    sequence = list(prompt)
    while len(sequence) < len(prompt) + max_tokens:
        sequence.append(zlib.crc32(bytes(sequence)) % 11 + 1)
        if sequence[-1] == STOP:
            break
    return sequence[len(prompt) :]


@pytest.fixture
def rote(controller: FakeController) -> ByRote:
    controller.execute = rote = ByRote()
    return rote


@pytest.fixture
def job(cluster: Cluster, rote: ByRote) -> Iterator[Job]:
    with cluster.job("job") as job:
        yield job


def models(job: Job, count: int) -> list[plexrl.Model]:
    return [job.model(f"r{number}", base=BASE, role="rollout") for number in range(count)]


def prompts(count: int) -> list[list[int]]:
    return [[5 + number, number % 4 + 1] for number in range(count)]


def generates(controller: FakeController, model: plexrl.Model) -> list[call_pb2.SubmitCallRequest]:
    submits = [s for s in controller.submits.values() if s.model_id == model.model_id]
    return [submit for submit in submits if submit.spec.WhichOneof("function") == "generate"]


def assert_equal(one: plexrl.Completions, other: plexrl.Completions) -> None:
    assert one.flat_token_ids.tolist() == other.flat_token_ids.tolist()
    assert one.lengths.tolist() == other.lengths.tolist()
    assert one.flat_logprobs.tolist() == other.flat_logprobs.tolist()
    assert one.finish_reasons == other.finish_reasons


@pytest.mark.parametrize(
    ("replicas", "tail", "leave", "count", "n"),
    [
        (4, 1, 0.2, 16, 4),
        (4, 2, 0.5, 13, 3),
        (3, 3, 0.5, 7, 2),
        (5, 1, 0.9, 5, 1),
        (4, 2, 0.9, 3, 5),
        (4, 2, 0.9, 1, 2),
        (3, 1, 0.0, 9, 1),
        (1, 1, 0.5, 4, 2),
    ],
)
def test_the_whole_is_what_one_model_says(job: Job, replicas: int, tail: int, leave: float, count: int, n: int) -> None:
    """Prompts fewer than replicas, nothing left, and nobody to leave it to are among them."""
    *several, alone = models(job, replicas + 1)
    for logprobs, tail_only in ((True, False), (False, False), (True, leave > 0 and tail < replicas)):
        rollouts = plexrl.RolloutReplicas(several, tail=tail, leave=leave, tail_only=tail_only)
        made = rollouts.generate(prompts(count), n=n, max_tokens=20, logprobs=logprobs)
        assert_equal(made, alone.generate(prompts(count), n=n, max_tokens=20, logprobs=logprobs))
        assert len(made) == count * n


def test_who_is_asked_for_what(controller: FakeController, job: Job) -> None:
    """What is left goes to the tail replicas alone, into the session that has their own calls; all at one version."""
    policy = job.model("policy", base=BASE)
    tail, *others = several = models(job, 4)
    rollouts = plexrl.RolloutReplicas(several, tail=1, leave=0.25)
    assert rollouts.pull_weights(policy) == rollouts.source_version == 6
    made = rollouts.generate(prompts(16), n=2, max_tokens=20, temperature=0.5, stop_token_ids=[STOP], seed=1)
    assert made.weights_version == 6
    (session_id,) = controller.sessions.opened
    unfinished = 0
    for model in others:
        (submit,) = generates(controller, model)
        assert (submit.session_id, submit.spec.generate.sampling.leave) == ("", 2)
        result = controller.calls[submit.request_id].result.generate
        unfinished += list(result.finish_reasons).count(t.FINISH_REASON_UNFINISHED)
    own, *rests = generates(controller, tail)
    assert unfinished == sum(len(batch_arrays(rest.spec.generate.prompts)[1]) for rest in rests) > 0
    for submit in (own, *rests):
        assert (submit.session_id, submit.spec.generate.sampling.leave) == (session_id, 0)
    asked = [submit.spec.generate for model in several for submit in generates(controller, model)]
    assert len({spec.sampling.seed for spec in asked}) == len(asked)
    assert {spec.version.exact for spec in asked} == {1}
    alike = {(s.sampling.temperature, s.sampling.logprobs, *s.sampling.stop_token_ids) for s in asked}
    assert alike == {(0.5, True, STOP)}
    assert controller.sessions.opened[session_id].state == session_pb2.SESSION_STATE_CLOSED


def test_a_tail_that_is_one_alone_has_no_part(controller: FakeController, job: Job) -> None:
    tail, *others = several = models(job, 3)
    made = plexrl.RolloutReplicas(several, leave=0.5, tail_only=True).generate(prompts(8), n=2, max_tokens=20)
    assert len(made) == 16
    assert [len(generates(controller, model)) for model in others] == [1, 1]
    asked = [
        spec for submit in generates(controller, tail) for spec in split(*batch_arrays(submit.spec.generate.prompts))
    ]
    assert asked
    for whole in asked:
        assert whole.tolist()[:2] in prompts(8)
        assert whole.size > 2


def test_nothing_is_left_to_nobody(controller: FakeController, job: Job) -> None:
    """Without a tail elsewhere no session is opened, and every part runs to its end."""
    several = models(job, 3)
    plexrl.RolloutReplicas(several, tail=3).generate(prompts(6), n=4, max_tokens=9)
    plexrl.RolloutReplicas(several, tail=2).generate(prompts(2), n=4, max_tokens=9)
    plexrl.RolloutReplicas(several, leave=0.0).generate(prompts(6), n=4, max_tokens=9)
    assert not controller.sessions.opened
    assert {s.spec.generate.sampling.leave for model in several for s in generates(controller, model)} == {0}


def test_replicas_that_hold_different_weights_sample_nothing_until_all_have_been_pulled(
    controller: FakeController, job: Job, rote: ByRote
) -> None:
    policy = job.model("policy", base=BASE)
    several = models(job, 2)
    rollouts = plexrl.RolloutReplicas(several)

    def synced_between(submit: call_pb2.SubmitCallRequest) -> t.CallResult | status_pb2.Status:
        rote.policy_version += 3
        return rote(submit)

    controller.execute = synced_between
    with pytest.raises(plexrl.FailedPrecondition, match=r"different weights of policy: r\d version (9|12), r\d"):
        rollouts.pull_weights(policy)
    controller.execute = rote
    with pytest.raises(plexrl.FailedPrecondition, match="pull again"):
        rollouts.generate(prompts(4), max_tokens=4)
    assert not generates(controller, several[0])
    assert rollouts.pull_weights(policy) == 12
    assert rollouts.generate(prompts(4), max_tokens=4).weights_version == 12


def test_after_a_pull_that_failed_the_next_one_may_follow(controller: FakeController, job: Job, rote: ByRote) -> None:
    """Whoever pulls again need not know which replica's sequence stands still."""
    policy, several = job.model("policy", base=BASE), models(job, 2)
    rollouts = plexrl.RolloutReplicas(several)

    def gone(submit: call_pb2.SubmitCallRequest) -> t.CallResult | status_pb2.Status:
        if submit.model_id == several[1].model_id:
            controller.blocked.add(submit.model_id)
            return status(code_pb2.FAILED_PRECONDITION, "VERSION_GONE", "the policy has gone on")
        return rote(submit)

    controller.execute = gone
    with pytest.raises(plexrl.VersionGone) as failed:
        rollouts.pull_weights(policy)
    assert failed.value.__notes__ == [f"in the pull of {several[1].name}"]
    controller.execute = rote
    assert rollouts.pull_weights(policy) == 6
    assert not controller.blocked


def test_more_rollouts_at_once_than_a_model_may_have_sessions(controller: FakeController, job: Job) -> None:
    """They share the tail's session, which is closed when the last of them has ended."""
    several = models(job, 2)
    rollouts = plexrl.RolloutReplicas(several, leave=0.5)
    controller.holding = True
    made: list[plexrl.Completions] = []
    threads = [
        threading.Thread(target=lambda: made.append(rollouts.generate(prompts(4), n=2, max_tokens=20)))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    controller.wait_for(lambda: len(controller.submits) == 24)
    controller.release()
    for thread in threads:
        thread.join(30)
    assert [len(completions) for completions in made] == [8] * 12
    (session,) = controller.sessions.opened.values()
    assert session.state == session_pb2.SESSION_STATE_CLOSED


def test_an_error_of_one_part_cancels_the_others_and_is_what_is_raised(
    controller: FakeController, job: Job, rote: ByRote
) -> None:
    several = models(job, 3)
    rollouts = plexrl.RolloutReplicas(several)
    broken = several[2].model_id
    for model in several:
        # The streams are up, and what is held stays.
        model.generate([[1]], max_tokens=1)
    controller.holding = True
    outcome: list[BaseException | None] = []

    def sample() -> None:
        try:
            rollouts.generate(prompts(9), max_tokens=5)
        except plexrl.PlexRLError as error:
            outcome.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    controller.wait_for(lambda: len(controller.submits) == 6)
    call = next(c for c in controller.calls.values() if c.model_id == broken and c.state == t.CALL_STATE_PENDING)
    controller.end(call, t.CALL_STATE_FAILED, status(code_pb2.FAILED_PRECONDITION, "STATE_LOST", "it is gone"))
    thread.join(10)
    assert [type(error) for error in outcome] == [plexrl.StateLost]
    states = [call.state for call in controller.calls.values() if call.model_id != broken]
    assert states.count(t.CALL_STATE_CANCELLED) == 2
    controller.holding = False
    assert len(rollouts.generate(prompts(9), max_tokens=5)) == 9


def test_a_pull_waits_for_the_rollout_that_is_under_way(controller: FakeController, job: Job) -> None:
    """What was left is asked for at the version of its rollout, which must be there until then."""
    policy = job.model("policy", base=BASE)
    rollouts = plexrl.RolloutReplicas(models(job, 2), leave=0.5)
    rollouts.pull_weights(policy)
    controller.holding = True
    made: list[plexrl.Completions] = []
    ahead = threading.Thread(target=lambda: made.append(rollouts.generate(prompts(8), n=2, max_tokens=20)))
    ahead.start()
    controller.wait_for(lambda: len(controller.submits) == 4)
    pull = threading.Thread(target=lambda: rollouts.pull_weights(policy))
    pull.start()
    pull.join(0.05)
    assert len(controller.submits) == 4
    controller.release()
    ahead.join(10)
    pull.join(10)
    assert made[0].weights_version == 6
    kinds = [submit.spec.WhichOneof("function") for submit in controller.submits.values()]
    assert kinds[:2] == kinds[-2:] == ["load_checkpoint"] * 2
    assert set(kinds[2:-2]) == {"generate"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tail": 0}, "tail: 0, want 1 to 2"),
        ({"tail": 3}, "tail: 3, want 1 to 2"),
        ({"leave": 1.0}, "leave: 1.0"),
        ({"leave": -0.1}, "leave: -0.1"),
        ({"leave": float("nan")}, "leave: nan"),
        ({"tail": 2, "tail_only": True}, "tail_only"),
        ({"leave": 0.0, "tail_only": True}, "tail_only"),
    ],
)
def test_settings_that_make_no_sense_are_refused(job: Job, arguments: dict[str, float], says: str) -> None:
    several = models(job, 2)
    with pytest.raises(plexrl.InvalidArgument, match=says):
        plexrl.RolloutReplicas(several, **arguments)  # type: ignore[arg-type]
    for some in ([], [several[0], several[0]]):
        with pytest.raises(plexrl.InvalidArgument, match="each once"):
            plexrl.RolloutReplicas(some)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompts": []}, "there are none"),
        ({"n": 0}, "n: 0"),
        ({"seed": -1}, "seed: -1"),
        ({"prompts": ["text", "text"]}, "tokenize"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    job: Job, arguments: dict[str, Sequence[str] | int], says: str
) -> None:
    rollouts = plexrl.RolloutReplicas(models(job, 2))
    with pytest.raises(plexrl.InvalidArgument, match=says):
        rollouts.generate(**{"prompts": prompts(2), "max_tokens": 3} | arguments)  # type: ignore[arg-type]


def test_prompts_may_be_an_array(job: Job) -> None:
    several = models(job, 2)
    made = plexrl.RolloutReplicas(several).generate(np.array(prompts(4)), max_tokens=3)  # type: ignore[arg-type]
    assert len(made) == 4


def test_generate_refuses_to_leave_what_it_does_not_have(job: Job) -> None:
    (model,) = models(job, 1)
    for leave in (-1, 4):
        with pytest.raises(plexrl.InvalidArgument, match=f"leave: {leave} of 4 completions"):
            model.generate(prompts(2), n=2, max_tokens=3, leave=leave)
    left = model.generate(prompts(2), n=2, max_tokens=20, leave=3)
    assert np.array(left.finish_reasons).tolist().count("unfinished") in (1, 2, 3)
