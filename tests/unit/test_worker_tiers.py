"""Any order of parks, loads, prefetches and drops: budgets hold, nothing is lost, and a copy that comes back is the one
that was parked.
"""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plexrl_worker.engine.ledger import state_layout
from plexrl_worker.engine.port import Component, ParkedComponent, ParkedState, StateLayout
from plexrl_worker.errors import HostStateCorrupt, OverBudget
from plexrl_worker.parked_files import Interrupted, ParkedFiles, StateFacts
from plexrl_worker.tiers import StateTiers

PAGE = 4096
HOST_PAGES, DISK_PAGES = 5, 12
MODELS = st.sampled_from(["a", "b", "c", "d", "e"])


def layout(pages: int) -> StateLayout:
    return state_layout([(Component.TRAIN_WEIGHTS, pages * PAGE), (Component.OPTIMIZER, 100)], pages)


def facts(model_id: str, sequence: int) -> StateFacts:
    return StateFacts(model_id, "built-alike", sequence, sequence, {"threads": "1"})


def parked(content: int, *, zero_optimizer: bool = False) -> ParkedState:
    return ParkedState(
        (
            ParkedComponent(Component.TRAIN_WEIGHTS, content),
            ParkedComponent(Component.OPTIMIZER, 0 if zero_optimizer else content, zero_optimizer),
        ),
        optimizer_step=content,
    )


class Moves(RuleBasedStateMachine):
    """A worker's tiers, and what each model's state should be: one number, which fills its image."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="plexrl-tiers-"))
        self.loop = asyncio.new_event_loop()
        self.on_device: str | None = None
        self.attached: set[str] = set()
        self.states: dict[str, int] = {}
        self.layouts: dict[str, StateLayout] = {}
        self.tiers = StateTiers(
            HOST_PAGES * PAGE,
            DISK_PAGES * PAGE,
            ParkedFiles(self.directory),
            in_use=lambda model_id: model_id == self.on_device,
            let_go=self._let_go,
        )
        self.counter = 0

    async def _let_go(self, model_id: str) -> None:
        assert model_id != self.on_device
        self.attached.discard(model_id)

    def _write(self, model_id: str, fd: int) -> None:
        """What an engine does when it parks: fills the image, and says what is in it."""
        self.counter += 1
        content = self.states[model_id] = self.counter
        for entry in self.layouts[model_id].components:
            os.pwrite(fd, bytes([content % 251]) * entry.size_bytes, entry.offset)
        self.tiers.holds(model_id, facts(model_id, content), parked(content))

    def _read(self, model_id: str, fd: int) -> None:
        """What an engine does when it loads: checks the image."""
        for entry in self.layouts[model_id].components:
            found = os.pread(fd, entry.size_bytes, entry.offset)
            assert found == bytes([self.states[model_id] % 251]) * entry.size_bytes

    @rule(model_id=MODELS, pages=st.integers(1, 4))
    def deploy(self, model_id: str, pages: int) -> None:
        if model_id in self.layouts or self.on_device is not None:
            return
        taken = sum(known.host_bytes for known in self.layouts.values())
        try:
            self.tiers.admit(model_id, layout(pages))
        except OverBudget:
            assert taken + layout(pages).host_bytes > max(HOST_PAGES, DISK_PAGES) * PAGE
            return
        self.layouts[model_id] = layout(pages)

        async def build() -> None:
            async with self.tiers.reserved(model_id) as image:
                self.attached.add(model_id)
                self._write(model_id, image.fd)

        self.loop.run_until_complete(build())

    @rule(model_id=MODELS, changed=st.booleans())
    def serve(self, model_id: str, changed: bool) -> None:
        """A load, perhaps a step, and a park."""
        if model_id not in self.states:
            return

        async def visit() -> None:
            self.tiers.note_load(model_id, preloaded=False)
            async with self.tiers.held(model_id) as image:
                self._read(model_id, image.fd)
                self.attached.add(model_id)
                self.on_device = model_id
            if changed:
                self._write(model_id, self.tiers.image(model_id).fd)
            self.on_device = None

        self.loop.run_until_complete(visit())

    @rule(model_id=MODELS)
    def prefetch(self, model_id: str) -> None:
        if model_id in self.states:
            self.loop.run_until_complete(self.tiers.prefetch(model_id))
            assert not self.tiers.on_disk_only(model_id)

    @rule(model_id=MODELS)
    def drop(self, model_id: str) -> None:
        self.loop.run_until_complete(self.tiers.remove(model_id))
        self.states.pop(model_id, None)
        self.layouts.pop(model_id, None)

    @rule()
    def plan_an_end(self) -> None:
        """Everything is on disk then, and whole."""
        self.loop.run_until_complete(self.tiers.write_all())
        kept = {copy.facts.model_id: copy for copy in ParkedFiles(self.directory).recover()}
        assert {model_id: copy.facts.applied_sequence for model_id, copy in kept.items()} == self.states

    @invariant()
    def budgets_hold(self) -> None:
        assert self.tiers.host_used_bytes <= HOST_PAGES * PAGE
        assert self.tiers.disk_used_bytes <= DISK_PAGES * PAGE

    def teardown(self) -> None:
        self.tiers.close()
        self.loop.close()
        shutil.rmtree(self.directory)


TestMoves = Moves.TestCase
TestMoves.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)


def image(content: bytes, size_bytes: int) -> int:
    fd = os.memfd_create("image")
    os.ftruncate(fd, size_bytes)
    os.pwrite(fd, content, 0)
    return fd


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_never_taken_for_the_state(tmp_path: Path, damage: str) -> None:
    """G08."""
    files, places = ParkedFiles(tmp_path), layout(2)
    fd = image(b"\7" * 2 * PAGE, places.host_bytes)
    copy = files.write(facts("m", 3), parked(3), places, fd, lambda: False)
    content = bytearray(copy.data_file.read_bytes())
    match damage:
        case "flip":
            content[PAGE + 5] ^= 1
            copy.data_file.write_bytes(content)
        case "truncate":
            copy.data_file.write_bytes(content[:PAGE])
        case _:
            copy.data_file.unlink()
    with pytest.raises(HostStateCorrupt, match="model m"):
        files.read(copy, fd, lambda: False)
    os.close(fd)


def test_a_write_that_is_stopped_leaves_the_earlier_copy(tmp_path: Path) -> None:
    files, places = ParkedFiles(tmp_path), layout(2)
    fd = image(b"\1" * 2 * PAGE, places.host_bytes)
    files.write(facts("m", 1), parked(1), places, fd, lambda: False)
    with pytest.raises(Interrupted):
        files.write(facts("m", 2), parked(2), places, fd, lambda: True)
    (copy,) = files.recover()
    assert copy.facts.applied_sequence == 1
    files.read(copy, fd, lambda: False)
    os.close(fd)


def test_what_is_all_zero_takes_no_room_on_disk(tmp_path: Path) -> None:
    files, places = ParkedFiles(tmp_path), layout(2)
    fd = image(b"\1" * 2 * PAGE, places.host_bytes)
    copy = files.write(facts("m", 1), parked(1, zero_optimizer=True), places, fd, lambda: False)
    assert copy.size_bytes == 2 * PAGE
    os.close(fd)


def test_a_half_written_life_is_cleared_away(tmp_path: Path) -> None:
    files, places = ParkedFiles(tmp_path), layout(1)
    fd = image(b"\1" * PAGE, places.host_bytes)
    whole = files.write(facts("whole", 1), parked(1), places, fd, lambda: False)
    torn = files.write(facts("torn", 1), parked(1), places, fd, lambda: False)
    next(path for path in tmp_path.glob("*.json") if path.stem == torn.data_file.name[:32]).write_text("{")
    (tmp_path / "0-1.state").write_bytes(b"x")
    (copy,) = ParkedFiles(tmp_path).recover()
    assert copy == whole
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".state"}
    assert len(list(tmp_path.iterdir())) == 2
    os.close(fd)
