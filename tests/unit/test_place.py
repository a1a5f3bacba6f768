"""Placement: strict about what it was asked, plain about why not."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl_controller.domain.ids import GroupId, JobId, ModelId, WorkerId
from plexrl_controller.scheduling.place import GroupRequest, Placed, PlacementRequest, Refused, place
from plexrl_controller.scheduling.policy import Policy
from plexrl_controller.scheduling.views import ClusterView, Hardware, MemberView, PlacedGroupView, Requirements

ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM")


def worker(
    name: str,
    *,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    architectures: frozenset[str] = frozenset(ARCHITECTURES),
    device_state_bytes: int = 1000,
    model_ids: frozenset[ModelId] = frozenset(),
    placed_bytes: int = 0,
) -> PlacedGroupView:
    """A worker that is a group of its own, with one job on it if it has models or bytes."""
    hardware = Hardware(device_state_bytes, 10_000, labels or {}, architectures)
    members = (MemberView(JobId("other"), placed_bytes, model_ids),) if model_ids or placed_bytes else ()
    return PlacedGroupView(GroupId(name), (WorkerId(name),), hardware, ready, members)


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
    unique_by=lambda w: w.group_id,
)
requests = st.builds(
    PlacementRequest,
    requirements=st.builds(
        Requirements,
        architecture=st.none() | st.sampled_from(ARCHITECTURES),
        labels=st.dictionaries(st.sampled_from(["gpu", "zone"]), st.sampled_from(["a", "b"])),
        colocate=st.frozensets(st.sampled_from([ModelId("m1"), ModelId("m2")])),
        avoid=st.frozensets(st.sampled_from([ModelId("m1"), ModelId("m2")])),
    ),
    groups=st.tuples(st.builds(GroupRequest, state_bytes=st.integers(0, 2000))),
)


@given(workers, requests)
def test_a_placed_model_has_all_it_asked_for(views: list[PlacedGroupView], request: PlacementRequest) -> None:
    outcome = place(ClusterView(views), request, Policy())
    if isinstance(outcome, Placed):
        chosen = next(w for w in views if w.worker_ids[0] == outcome.worker_id)
        hardware, state_bytes = chosen.hardware, request.groups[0].state_bytes
        models = frozenset(m for member in chosen.members for m in member.model_ids)
        assert chosen.ready
        assert request.requirements.architecture in (None, *hardware.architectures)
        assert request.requirements.labels.items() <= hardware.labels.items()
        assert request.requirements.colocate <= models
        assert not request.requirements.avoid & models
        assert state_bytes <= hardware.device_state_bytes
        assert sum(m.state_bytes for m in chosen.members) + state_bytes <= hardware.host_state_bytes


@given(workers, requests)
def test_a_refusal_says_why(views: list[PlacedGroupView], request: PlacementRequest) -> None:
    outcome = place(ClusterView(views), request, Policy())
    if isinstance(outcome, Refused):
        assert outcome.reason


def test_models_spread_over_workers() -> None:
    busy = worker("p", placed_bytes=500, model_ids=frozenset({ModelId("m1")}))
    outcome = place(ClusterView([busy, worker("q")]), PlacementRequest(), Policy())
    assert isinstance(outcome, Placed)
    assert outcome.worker_id == "q"


def test_a_worker_that_is_away_is_a_temporary_reason_and_a_missing_label_is_not() -> None:
    away = place(ClusterView([worker("p", ready=False)]), PlacementRequest(), Policy())
    assert isinstance(away, Refused)
    assert away.temporary
    never = place(
        ClusterView([worker("p")]), PlacementRequest(requirements=Requirements(labels={"gpu": "h200"})), Policy()
    )
    assert isinstance(never, Refused)
    assert not never.temporary
    assert "gpu=h200" in never.reason
