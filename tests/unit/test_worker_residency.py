"""Where copies are, and that the device's budget is never exceeded, over any order of moves."""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plexrl_worker.engine.port import Component
from plexrl_worker.errors import OverBudget
from plexrl_worker.residency import Residency

BUDGET = 100
MODELS = st.sampled_from(["a", "b", "c"])
SIZES = st.dictionaries(st.sampled_from(list(Component)), st.integers(1, 40), min_size=1)


class Moves(RuleBasedStateMachine):
    """A daemon's moves, checked before each, beside a model that only remembers which copy is newest."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(BUDGET)
        self.known: dict[str, dict[Component, int]] = {}
        self.stateless: set[str] = set()
        self.changed: dict[str, set[Component]] = {}

    @rule(model_id=MODELS, sizes=SIZES)
    def add(self, model_id: str, sizes: dict[Component, int]) -> None:
        if model_id in self.known:
            return
        try:
            self.residency.add(model_id, sizes)
        except OverBudget:
            assert sum(sizes.values()) > BUDGET
            return
        self.known[model_id] = sizes
        self.stateless.add(model_id)

    @rule(model_id=MODELS)
    def remove(self, model_id: str) -> None:
        self.residency.remove(model_id)
        self.known.pop(model_id, None)
        self.stateless.discard(model_id)
        self.changed.pop(model_id, None)

    @rule(model_id=MODELS, evict=st.sets(MODELS))
    def load(self, model_id: str, evict: set[str]) -> None:
        if model_id not in self.known or self.residency.on_device(model_id):
            return
        present = evict & set(self.known)
        kept = sum(sum(self.known[m].values()) for m in set(self.residency.resident_models()) - present)
        try:
            self.residency.check_fits(model_id, present)
        except OverBudget:
            assert kept + sum(self.known[model_id].values()) > BUDGET
            return
        for other in sorted(present - {model_id}):
            if self.residency.on_device(other):
                self.residency.parked(other)
                self.changed.pop(other, None)
        if model_id in self.stateless:
            self.residency.built(model_id)
            self.stateless.discard(model_id)
            self.changed[model_id] = set(self.known[model_id])
        else:
            self.residency.loaded(model_id)

    @rule(model_id=MODELS, names=st.sets(st.sampled_from(list(Component))))
    def change(self, model_id: str, names: set[Component]) -> None:
        if model_id in self.known and self.residency.on_device(model_id):
            self.residency.changed(model_id, names)
            self.changed.setdefault(model_id, set()).update(names & set(self.known[model_id]))

    @rule(model_id=MODELS)
    def die(self, model_id: str) -> None:
        if model_id in self.known and self.residency.on_device(model_id):
            lost = self.residency.device_gone(model_id)
            assert lost == bool(self.changed.pop(model_id, None))
            if lost:
                self.stateless.add(model_id)

    @invariant()
    def within_budget(self) -> None:
        assert self.residency.device_used_bytes <= BUDGET

    @invariant()
    def newest_copies_are_known(self) -> None:
        for model_id in self.known:
            for name, copies in self.residency.components(model_id).items():
                assert copies.dirty == (name in self.changed.get(model_id, set()))
                assert (copies.on_device or copies.parked) == (model_id not in self.stateless)


Moves.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=30)
TestMoves = Moves.TestCase
