"""Placement: strict about what it was asked, plain about why not."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl_controller.domain.ids import ModelId, WorkerId
from plexrl_controller.scheduling.place import Placed, PlacementRequest, Refused, place
from plexrl_controller.scheduling.views import ClusterView, WorkerView

ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM")


def worker(name: str, **fields: object) -> WorkerView:
    known: dict[str, object] = {
        "ready": True,
        "labels": {},
        "architectures": frozenset(ARCHITECTURES),
        "catalogue": frozenset(),
        "device_state_bytes": 1000,
        "host_state_bytes": 10_000,
    }
    return WorkerView(WorkerId(name), **(known | fields))  # type: ignore[arg-type]


workers = st.lists(
    st.builds(
        worker,
        st.sampled_from("pqrs"),
        ready=st.booleans(),
        labels=st.dictionaries(st.sampled_from(["gpu", "zone"]), st.sampled_from(["a", "b"])),
        architectures=st.frozensets(st.sampled_from(ARCHITECTURES)),
        device_state_bytes=st.integers(0, 2000),
        model_ids=st.frozensets(st.sampled_from([ModelId("m1"), ModelId("m2")])),
        placed_bytes=st.integers(0, 12_000),
    ),
    max_size=4,
    unique_by=lambda w: w.worker_id,
)
requests = st.builds(
    PlacementRequest,
    architecture=st.none() | st.sampled_from(ARCHITECTURES),
    require=st.dictionaries(st.sampled_from(["gpu", "zone"]), st.sampled_from(["a", "b"])),
    colocate=st.frozensets(st.sampled_from([ModelId("m1"), ModelId("m2")])),
    avoid=st.frozensets(st.sampled_from([ModelId("m1"), ModelId("m2")])),
    state_bytes=st.integers(0, 2000),
)


@given(workers, requests)
def test_a_placed_model_has_all_it_asked_for(views: list[WorkerView], request: PlacementRequest) -> None:
    outcome = place(ClusterView(views), request)
    if isinstance(outcome, Placed):
        chosen = next(w for w in views if w.worker_id == outcome.worker_id)
        assert chosen.ready
        assert request.architecture in (None, *chosen.architectures)
        assert request.require.items() <= chosen.labels.items()
        assert request.colocate <= chosen.model_ids
        assert not request.avoid & chosen.model_ids
        assert request.state_bytes <= chosen.device_state_bytes
        assert chosen.placed_bytes + request.state_bytes <= chosen.host_state_bytes


@given(workers, requests)
def test_a_refusal_says_why(views: list[WorkerView], request: PlacementRequest) -> None:
    outcome = place(ClusterView(views), request)
    if isinstance(outcome, Refused):
        assert outcome.reason


def test_models_spread_over_workers() -> None:
    busy = worker("p", placed_bytes=500, model_ids=frozenset({ModelId("m1")}))
    assert place(ClusterView([busy, worker("q")]), PlacementRequest()) == Placed(WorkerId("q"))


def test_a_worker_that_is_away_is_a_temporary_reason_and_a_missing_label_is_not() -> None:
    away = place(ClusterView([worker("p", ready=False)]), PlacementRequest())
    assert isinstance(away, Refused)
    assert away.temporary
    never = place(ClusterView([worker("p")]), PlacementRequest(require={"gpu": "h200"}))
    assert isinstance(never, Refused)
    assert not never.temporary
    assert "gpu=h200" in never.reason
