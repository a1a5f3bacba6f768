"""Moves a deployment's components between device memory, host image and the generator's slot, for the real engine.

Owns who has the slot. `preload` alone may run in another thread, beside everything else: it touches nothing but memory
that no computation uses until `swap_in` takes it.
"""

import itertools
import threading
import time
from collections.abc import Collection, Mapping

import torch

from plexrl_worker.engine.deployment import Deployment, Preloaded
from plexrl_worker.engine.device import Device
from plexrl_worker.engine.errors import Aborted, OutOfMemory, SlotOccupied
from plexrl_worker.engine.generator import Generator
from plexrl_worker.engine.port import (
    ALL_COMPONENTS,
    TRAIN_COMPONENTS,
    Component,
    Control,
    ParkedComponent,
    ParkedState,
    SwapReport,
)
from plexrl_worker.engine.trainer import Trainer


class StateMover:
    """The moves of one engine's deployments."""

    def __init__(self, device: Device, generator: Generator, trainer: Trainer) -> None:
        self._device = device
        self._generator = generator
        self._trainer = trainer
        self._slot_owner: str | None = None
        self._content_numbers = itertools.count(1)
        self._preloading = threading.Lock()

    def claim_slot(self, deployment_id: str) -> None:
        """Raises SlotOccupied while another deployment's weights are in the generator."""
        owner = self._slot_owner
        if owner is not None and owner != deployment_id:
            raise SlotOccupied(f"the generator holds the weights of {owner}: swap them out first")

    def fill_slot(self, deployment: Deployment, weights: Mapping[str, torch.Tensor]) -> None:
        """Puts weights, by their Hugging Face names, into the generator."""
        self._generator.slot.fill(weights)
        self._own_slot(deployment)
        deployment.ledger.write(Component.ROLLOUT_WEIGHTS)

    def swap_out(self, deployment: Deployment, components: Collection[Component], control: Control) -> SwapReport:
        """See port.Engine."""
        started_s = time.monotonic()
        used_bytes = self._device.used_bytes()
        leaving = deployment.ledger.resident(components)
        moved = self._park(deployment, leaving, control)
        for component in leaving:
            self.release(deployment, component)
        self._device.trim()
        released, parked = used_bytes - self._device.used_bytes(), deployment.ledger.parked_state()
        return SwapReport(moved, released, time.monotonic() - started_s, parked, self._device.held_bytes())

    def write_back(self, deployment: Deployment, components: Collection[Component], control: Control) -> SwapReport:
        """See port.Engine."""
        started_s = time.monotonic()
        moved = self._park(deployment, deployment.ledger.resident(components), control)
        parked = deployment.ledger.parked_state()
        return SwapReport(moved, 0, time.monotonic() - started_s, parked, self._device.held_bytes())

    def swap_in(
        self, deployment: Deployment, parked: ParkedState, components: Collection[Component], control: Control
    ) -> SwapReport:
        """See port.Engine."""
        started_s = time.monotonic()
        ledger = deployment.ledger
        copies = ledger.parked_of(parked, components)
        if any(copy.component is Component.ROLLOUT_WEIGHTS for copy in copies):
            self.claim_slot(ledger.deployment_id)
        moved = allocated = 0
        arrived: list[Component] = []
        try:
            for copy in copies:
                self._take_component(deployment, copy.component, arrived)
                moved += self._bring(deployment, copy, arrived)
                allocated += ledger.place(copy.component).size_bytes
                ledger.adopt(copy, parked)
                control.progress(moved, deployment.layout.host_bytes)
        finally:
            self.discard_preloaded(deployment)
        held = self._device.held_bytes()
        return SwapReport(moved, allocated, time.monotonic() - started_s, ledger.parked_state(), held)

    def preload(self, deployment: Deployment, parked: ParkedState, control: Control) -> SwapReport:
        """See port.Engine. The slot is another's, so the rollout weights wait in a region of their own."""
        started_s = time.monotonic()
        with self._preloading:
            self._discard(deployment)
            moved = 0
            preloaded = deployment.preloaded = Preloaded()
            try:
                for copy in deployment.ledger.parked_of(parked, ALL_COMPONENTS):
                    if copy.is_zero:
                        continue
                    if control.aborted():
                        raise Aborted("stopped between components; the parked state is as before")
                    with self._device.moving():
                        moved += self._preload_component(deployment, preloaded, copy)
                    control.progress(moved, deployment.layout.host_bytes)
            except BaseException:
                self._discard(deployment)
                raise
        return SwapReport(moved, moved, time.monotonic() - started_s, parked, self._device.held_bytes())

    def discard_preloaded(self, deployment: Deployment) -> None:
        """Gives up what was preloaded and frees its memory; there may be nothing."""
        with self._preloading:
            self._discard(deployment)

    def take(self, deployment: Deployment) -> None:
        """Takes the memory of all components, to be filled anew: nothing or all of it. Raises OutOfMemory."""
        self.discard_preloaded(deployment)
        taken: list[Component] = []
        for component in deployment.ledger.existing(TRAIN_COMPONENTS):
            if not deployment.ledger.resident([component]):
                self._take_component(deployment, component, taken)

    def release(self, deployment: Deployment, component: Component) -> None:
        """Gives a component's memory back; its content is lost."""
        if component is Component.ROLLOUT_WEIGHTS:
            self._slot_owner = None
            self._generator.slot.release()
        else:
            self._trainer.unbind()
            deployment.regions[component].release()
        deployment.ledger.evict(component)

    def drop(self, deployment: Deployment) -> None:
        """Frees all that a deployment holds."""
        self.discard_preloaded(deployment)
        for component in deployment.ledger.resident():
            self.release(deployment, component)
        self._device.trim()
        self.detach(deployment)

    def detach(self, deployment: Deployment) -> None:
        """Lets go of the host image."""
        if deployment.image is not None:
            self._device.unpin(deployment.image)
            deployment.image = None
        deployment.ledger.forget_image()

    def _park(self, deployment: Deployment, components: Collection[Component], control: Control) -> int:
        """Copies those of `components` that are dirty to the host image; returns the bytes copied."""
        ledger, moved = deployment.ledger, 0
        for component in components:
            if ledger.is_dirty(component) and ledger.is_zero(component):
                ledger.park(component, 0)
            elif ledger.is_dirty(component):
                place = deployment.place(component)
                ledger.park(component, self._device.park(self._pieces(deployment, component), place))
                moved += place.size
            control.progress(moved, deployment.layout.host_bytes)
        return moved

    def _bring(self, deployment: Deployment, copy: ParkedComponent, arrived: list[Component]) -> int:
        """Fills a component's memory from its parked copy, verified; returns the bytes copied from the host."""
        pieces, moved = self._pieces(deployment, copy.component), 0
        if copy.is_zero:
            for piece in pieces:
                piece.zero_()
        elif not self._take_preloaded(deployment, copy):
            place = deployment.place(copy.component)
            moved = place.size
            if self._device.unpark(place, pieces) != copy.checksum:
                for component in arrived:
                    self.release(deployment, component)
                raise deployment.ledger.corrupt(copy.component)
        if copy.component is Component.ROLLOUT_WEIGHTS:
            self._own_slot(deployment)
        return moved

    def _preload_component(self, deployment: Deployment, preloaded: Preloaded, copy: ParkedComponent) -> int:
        place = deployment.ledger.place(copy.component)
        if copy.component is Component.ROLLOUT_WEIGHTS:
            region = preloaded.slot = self._device.region(place.size_bytes)
        else:
            region = deployment.regions[copy.component]
        region.take()
        if self._device.unpark(deployment.place(copy.component), region.pieces) != copy.checksum:
            raise deployment.ledger.corrupt(copy.component)
        preloaded.copies[copy.component] = copy
        return place.size_bytes

    def _take_preloaded(self, deployment: Deployment, copy: ParkedComponent) -> bool:
        """Whether the component's memory holds this very copy already, or does now."""
        preloaded = deployment.preloaded
        if preloaded is None or preloaded.copies.get(copy.component) != copy:
            return False
        if copy.component is Component.ROLLOUT_WEIGHTS:
            assert preloaded.slot is not None
            source = preloaded.slot.pieces[0]
            for piece in self._generator.slot.pieces:
                piece.copy_(source[: piece.numel()])
                source = source[piece.numel() :]
            preloaded.slot.release()
        return True

    def _discard(self, deployment: Deployment) -> None:
        preloaded, deployment.preloaded = deployment.preloaded, None
        if preloaded is None:
            return
        for component in deployment.ledger.existing(TRAIN_COMPONENTS):
            if not deployment.ledger.resident([component]):
                deployment.regions[component].release()
        if preloaded.slot is not None:
            preloaded.slot.release()

    def _take_component(self, deployment: Deployment, component: Component, taken: list[Component]) -> None:
        """Takes one component's memory; when there is none, gives back those in `taken` and raises OutOfMemory."""
        try:
            if component is not Component.ROLLOUT_WEIGHTS:
                deployment.regions[component].take()
        except OutOfMemory:
            for earlier in taken:
                self.release(deployment, earlier)
            raise
        taken.append(component)

    def _pieces(self, deployment: Deployment, component: Component) -> list[torch.Tensor]:
        if component is Component.ROLLOUT_WEIGHTS:
            return list(self._generator.slot.pieces)
        return list(deployment.regions[component].pieces)

    def _own_slot(self, deployment: Deployment) -> None:
        """Names the slot's new content: KV that other content made is never used for it."""
        self._slot_owner = deployment.ledger.deployment_id
        deployment.content_key = f"{self._slot_owner}#{next(self._content_numbers)}"
