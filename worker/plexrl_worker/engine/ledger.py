"""Which components of a deployment are on the device, and which have a valid copy in its host image.

Bookkeeping alone: moves no bytes. Both engines keep their truth here.
"""

from collections.abc import Collection, Iterable

from plexrl_worker.engine.errors import InvalidArgument, NotResident, ParkedStateCorrupt
from plexrl_worker.engine.port import (
    ALL_COMPONENTS,
    Component,
    ComponentLayout,
    DeploymentState,
    ParkedComponent,
    ParkedState,
    StateLayout,
)

# Components start on page boundaries of the image, so that pages can be dropped and pinned one component at a time.
IMAGE_ALIGNMENT_BYTES = 4096


def state_layout(sizes: Iterable[tuple[Component, int]], parameter_count: int) -> StateLayout:
    """Lays components out in a host image, in the order given; sizes in bytes."""
    layouts, offset = [], 0
    for component, size_bytes in sizes:
        layouts.append(ComponentLayout(component, offset, size_bytes))
        offset += -(-size_bytes // IMAGE_ALIGNMENT_BYTES) * IMAGE_ALIGNMENT_BYTES
    return StateLayout(tuple(layouts), offset, parameter_count)


class ComponentLedger:
    """Residency of one deployment. Components outside `layout` do not exist for it and are passed over."""

    def __init__(self, deployment_id: str, layout: StateLayout) -> None:
        self.deployment_id = deployment_id
        self.layout = layout
        self.optimizer_step = 0
        self.rollout_version = 0
        self._layouts = {entry.component: entry for entry in layout.components}
        self._resident: set[Component] = set()
        self._zero: set[Component] = set()
        self._parked: dict[Component, ParkedComponent] = {}

    def place(self, component: Component) -> ComponentLayout:
        """Where the component lies in the image."""
        return self._layouts[component]

    def existing(self, components: Collection[Component]) -> list[Component]:
        """Those of `components` that this deployment has, in image order."""
        return [entry.component for entry in self.layout.components if entry.component in components]

    def resident(self, components: Collection[Component] = ALL_COMPONENTS) -> list[Component]:
        """Those of `components` that are on the device, in image order."""
        return [component for component in self.existing(components) if component in self._resident]

    def is_zero(self, component: Component) -> bool:
        """Whether a component on the device is known to be all zero."""
        return component in self._zero

    def is_dirty(self, component: Component) -> bool:
        """Whether a component is on the device and the image has no valid copy."""
        return component in self._resident and component not in self._parked

    def require(self, components: Collection[Component], function: str) -> None:
        """Raises NotResident unless all of `components` are on the device."""
        missing = [component for component in components if component not in self._resident]
        if missing:
            raise NotResident(
                f"{function} needs {', '.join(missing)} of {self.deployment_id} on the device: swap them in first"
            )

    def write(self, component: Component, *, zero: bool = False) -> None:
        """The component on the device has new content; the image's copy is out of date."""
        self._resident.add(component)
        self._parked.pop(component, None)
        if zero:
            self._zero.add(component)
        else:
            self._zero.discard(component)

    def park(self, component: Component, checksum: int) -> None:
        """The image holds the component's content as it is on the device."""
        self._parked[component] = ParkedComponent(component, checksum, component in self._zero)

    def evict(self, component: Component) -> None:
        """The component left the device."""
        self._resident.discard(component)
        self._zero.discard(component)

    def forget_image(self) -> None:
        """The image was replaced: it holds nothing."""
        self._parked.clear()

    def parked_of(self, parked: ParkedState, components: Collection[Component]) -> list[ParkedComponent]:
        """The copies to bring back: those of `components` that are not on the device.

        Raises InvalidArgument when `parked` has no copy of one.
        """
        copies = {copy.component: copy for copy in parked.components}
        wanted = [component for component in self.existing(components) if component not in self._resident]
        missing = [component for component in wanted if component not in copies]
        if missing:
            raise InvalidArgument(f"swap_in: {self.deployment_id} has no parked {', '.join(missing)}")
        return [copies[component] for component in wanted]

    def corrupt(self, component: Component) -> ParkedStateCorrupt:
        """The copy in the image is not what was parked; forgets it and returns the error to raise."""
        self._parked.pop(component, None)
        self.evict(component)
        return ParkedStateCorrupt(
            f"parked {component} of {self.deployment_id} does not have the checksum it was parked with: "
            "restore the model from a checkpoint"
        )

    def adopt(self, copy: ParkedComponent, parked: ParkedState) -> None:
        """A copy was brought to the device and checked."""
        self._resident.add(copy.component)
        self._parked[copy.component] = copy
        if copy.is_zero:
            self._zero.add(copy.component)
        else:
            self._zero.discard(copy.component)
        if copy.component is Component.ROLLOUT_WEIGHTS:
            self.rollout_version = parked.rollout_version
        else:
            self.optimizer_step = parked.optimizer_step

    def parked_state(self) -> ParkedState:
        """What the image holds, and the scalars."""
        copies = tuple(self._parked[c] for c in self.existing(ALL_COMPONENTS) if c in self._parked)
        return ParkedState(copies, self.optimizer_step, self.rollout_version)

    def state(self) -> DeploymentState:
        """Where the deployment stands."""
        dirty = frozenset(component for component in self._resident if self.is_dirty(component))
        return DeploymentState(frozenset(self._resident), dirty, self.optimizer_step, self.rollout_version)
