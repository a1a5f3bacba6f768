"""Bookkeeping of which component of which deployment is on which tier. Pure: it moves nothing and knows no engine.

A component is on the device or not, and its host copy is as new as the device's or not. What is on the device alone is
dirty, and is lost if the engine dies; a clean component's host copy stays true whatever happens to the engine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from plexrl_worker.engine.port import Component
from plexrl_worker.errors import NotDeployed, NotResident, OverBudget


@dataclass(frozen=True)
class Copies:
    """Where one component is. Neither on the device nor parked: absent."""

    size_bytes: int
    on_device: bool = False
    parked: bool = False

    @property
    def dirty(self) -> bool:
        """Whether the newest copy is on the device alone."""
        return self.on_device and not self.parked


class Residency:
    """Who is where, within the device's budget of model state."""

    def __init__(self, device_budget_bytes: int) -> None:
        self._device_budget_bytes = device_budget_bytes
        self._models: dict[str, dict[Component, Copies]] = {}
        self._preloaded: set[str] = set()

    @property
    def device_used_bytes(self) -> int:
        """Bytes of model state on the device, what was brought there ahead of its swap included."""
        return sum(self._device_bytes(model_id) for model_id in self._models) + sum(map(self._size, self._preloaded))

    def add(self, model_id: str, component_bytes: Mapping[Component, int]) -> None:
        """A deployment that has no state yet. Raises OverBudget when it could never be on the device."""
        state_bytes = sum(component_bytes.values())
        if state_bytes > self._device_budget_bytes:
            raise OverBudget(
                f"model {model_id} needs {state_bytes} bytes of device state, this worker's device may hold "
                f"{self._device_budget_bytes}: use a smaller model or a worker with a larger --device-state-bytes",
                metadata=self._numbers(state_bytes),
            )
        self._models[model_id] = {name: Copies(size) for name, size in component_bytes.items()}

    def remove(self, model_id: str) -> None:
        """Forgets a deployment; forgetting one that is not here is fine."""
        self._models.pop(model_id, None)
        self._preloaded.discard(model_id)

    def components(self, model_id: str) -> Mapping[Component, Copies]:
        """The components of a deployment, by name."""
        try:
            return self._models[model_id]
        except KeyError:
            raise NotDeployed(f"model {model_id} is not on this worker") from None

    def on_device(self, model_id: str) -> bool:
        """Whether any of the deployment's state is in use on the device."""
        return any(copies.on_device for copies in self.components(model_id).values())

    def preloaded(self, model_id: str) -> bool:
        """Whether a parked state is also in spare device memory, ready for its swap."""
        return model_id in self._preloaded

    def set_preloaded(self, model_id: str, *, preloaded: bool) -> None:
        """A parked state came into spare device memory, or is there no longer."""
        if preloaded:
            self._preloaded.add(model_id)
        else:
            self._preloaded.discard(model_id)

    def check_preload(self, model_id: str) -> None:
        """Raises OverBudget when the device's budget does not leave room for a state beside what is there."""
        used, needed = self.device_used_bytes, self._size(model_id)
        if used + needed > self._device_budget_bytes:
            raise OverBudget(
                f"prefetching model {model_id} to the device needs {needed} bytes beside {used}, its budget is "
                f"{self._device_budget_bytes}: it stays in host memory",
                metadata=self._numbers(needed, used),
            )

    def in_the_way(self, load_model_id: str) -> list[str]:
        """Preloaded states to give up, so that a model that is coming onto the device fits its budget."""
        leaving: list[str] = []
        others = [model_id for model_id in self._models if model_id in self._preloaded and model_id != load_model_id]
        kept = sum(self._device_bytes(model_id) for model_id in self._models if model_id != load_model_id)
        used = kept + self._size(load_model_id) + sum(map(self._size, others))
        while others and used > self._device_budget_bytes:
            leaving.append(others.pop(0))
            used -= self._size(leaving[-1])
        return leaving

    def resident_models(self) -> list[str]:
        """The deployments with state on the device, in the order of their deployment."""
        return [model_id for model_id in self._models if self.on_device(model_id)]

    def require_on_device(self, model_id: str) -> None:
        """Raises NotResident when a call could not run on it."""
        for copies in self.components(model_id).values():
            if not copies.on_device:
                raise NotResident(f"model {model_id} is parked: a swap_weights order must load it first")

    def check_fits(self, load_model_id: str, evict_model_ids: Iterable[str]) -> None:
        """Raises OverBudget when loading a model, after the evictions, would exceed the device's budget."""
        leaving = {*evict_model_ids, load_model_id}
        kept = sum(self._device_bytes(model_id) for model_id in self._models if model_id not in leaving)
        needed = self._size(load_model_id)
        if kept + needed > self._device_budget_bytes:
            raise OverBudget(
                f"loading model {load_model_id} needs {needed} bytes beside {kept} that stay on the device, its budget "
                f"is {self._device_budget_bytes}: evict more models in the same order",
                metadata=self._numbers(needed, kept),
            )

    def built(self, model_id: str) -> None:
        """A new state was made on the device; no host copy has it."""
        self._update(model_id, on_device=True, parked=False)

    def loaded(self, model_id: str) -> None:
        """All components came onto the device; the host copies stay and are as new."""
        self._update(model_id, on_device=True, parked=True)

    def written_back(self, model_id: str, names: Iterable[Component]) -> None:
        """The host copies of components became as new as the device's, which stay."""
        components = self._models[model_id]
        for name in names:
            components[name] = replace(components[name], parked=True)

    def parked(self, model_id: str) -> None:
        """All components left the device; the host copies are the newest."""
        self._update(model_id, on_device=False, parked=True)

    def changed(self, model_id: str, names: Iterable[Component]) -> None:
        """A call changed components on the device."""
        components = self._models[model_id]
        for name in names:
            if name in components:
                components[name] = replace(components[name], parked=False)

    def device_gone(self, model_id: str) -> bool:
        """The device's copies died with their engine. True when the state is lost: its host image is older or torn."""
        lost = any(not copies.parked for copies in self.components(model_id).values())
        self._update(model_id, on_device=False, parked=not lost)
        return lost

    def state_gone(self, model_id: str) -> None:
        """No copy of the state is left, or none that may be used."""
        self._update(model_id, on_device=False, parked=False)

    def _update(self, model_id: str, *, on_device: bool, parked: bool) -> None:
        components = self._models[model_id]
        for name, copies in components.items():
            components[name] = replace(copies, on_device=on_device, parked=parked)

    def _device_bytes(self, model_id: str) -> int:
        return sum(copies.size_bytes for copies in self._models[model_id].values() if copies.on_device)

    def _size(self, model_id: str) -> int:
        return sum(copies.size_bytes for copies in self.components(model_id).values())

    def _numbers(self, needed_bytes: int, kept_bytes: int = 0) -> dict[str, str]:
        return {
            "needed_bytes": str(needed_bytes),
            "kept_bytes": str(kept_bytes),
            "budget_bytes": str(self._device_budget_bytes),
        }
