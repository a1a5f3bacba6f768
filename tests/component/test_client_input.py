"""What the SDK is given by mistake is refused with what to do, and never changed on the way."""

from collections.abc import Iterator

import numpy as np
import pytest

import plexrl
from plexrl import wire
from plexrl.cluster import Cluster
from plexrl.job import Job
from plexrl.model import Model
from plexrl.v1 import types_pb2 as t
from plexrl_controller.api.validation import check_spec
from tests.support.client import cluster_fixture, controller_fixture  # noqa: F401
from tests.support.fake_controller import FakeController


@pytest.fixture
def job(cluster: Cluster) -> Iterator[Job]:
    with cluster.job("job") as job:
        yield job


@pytest.fixture
def model(job: Job) -> Model:
    return job.model("policy", base=plexrl.Init({"architectures": ["Qwen3ForCausalLM"]}))


def test_only_a_checkpoint_or_base_is_loaded(controller: FakeController, model: Model) -> None:
    saved = model.save_checkpoint.submit("a")
    for odd in (None, 7, saved):
        with pytest.raises(plexrl.InvalidArgument, match=r"plexrl\.BASE"):
            model.load_checkpoint(odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [np.array([1.9]), [1.5], np.array([2**32 + 5]), np.array([2**32 - 1], np.uint32)])
def test_token_ids_are_not_changed_on_the_way(model: Model, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="want"):
        model.generate([ids], max_tokens=1)
    with pytest.raises(ValueError, match="want"):
        plexrl.TrainingBatch.from_targets([ids], [[1]])


def test_what_a_naive_user_gives_is_refused_with_what_to_do(job: Job, model: Model) -> None:
    with pytest.raises(plexrl.InvalidArgument, match="list of strings"):
        model.generate([[1]], max_tokens=1, stop="END")
    with pytest.raises(plexrl.InvalidArgument, match=r"plexrl\.Catalogue"):
        job.model("b", base="Qwen/Qwen3")  # type: ignore[arg-type]
    with pytest.raises(plexrl.InvalidArgument, match="precision: 'fp16'"):
        job.model("b", base=plexrl.Catalogue("x"), precision="fp16")  # type: ignore[arg-type]


def test_a_closed_connection_says_so(cluster: Cluster) -> None:
    job = cluster.job("job")
    model = job.model("policy", base=plexrl.Init({"architectures": ["x"]}))
    job.finish()
    cluster.close()
    with pytest.raises(plexrl.ConfigurationError, match="closed"):
        model.resume()


_ARRAYS_OF_LOSS = {
    t.LOSS_CROSS_ENTROPY: (),
    t.LOSS_GRPO: ("advantages", "old_logprobs", "ref_logprobs"),
    t.LOSS_LINEAR: ("logprob_grads",),
}


@pytest.mark.parametrize("loss", [loss for loss in t.Loss.values() if loss != t.LOSS_UNSPECIFIED])
def test_every_loss_that_the_protocol_has_is_taken(loss: t.Loss.ValueType) -> None:
    values = wire.tensor([0.0, 1.0], "float32")
    spec = t.ForwardBackwardSpec(
        batch=t.TokenBatch(token_ids=wire.tensor([1, 2], "int32"), lengths=wire.tensor([2], "int32")),
        loss=loss,
        weights=values,
    )
    for array in _ARRAYS_OF_LOSS.get(loss, ("advantages", "old_logprobs")):
        getattr(spec, array).CopyFrom(values)
    check_spec(t.CallSpec(forward_backward=spec))
