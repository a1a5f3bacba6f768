"""One deployment's memory in the real engine: its regions on the device, its host image, its ledger."""

from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from plexrl_worker.engine.device import Device, Region, padded
from plexrl_worker.engine.errors import InvalidArgument
from plexrl_worker.engine.ledger import ComponentLedger, state_layout
from plexrl_worker.engine.port import (
    ByteArray,
    Component,
    ParkedComponent,
)
from plexrl_worker.engine.settings import DeploymentSettings
from plexrl_worker.engine.trainer import Trainer
from plexrl_worker.engine.weight_slot import RolloutContent


@dataclass
class Preloaded:
    """Parked components whose content is on the device, verified, before they are swapped in.

    slot: where the rollout weights wait for the generator's slot; the others are in the deployment's own regions.
    """

    copies: dict[Component, ParkedComponent] = field(default_factory=dict)
    slot: Region | None = None


class Deployment:
    """One deployment's memory and ledger. The rollout weights live in the generator's slot, not here; one that is
    sampled alone has no other memory.
    """

    def __init__(
        self, deployment_id: str, settings: DeploymentSettings, trainer: Trainer, slot_bytes: int, device: Device
    ) -> None:
        weight_bytes = padded(4 * trainer.element_count)
        sizes = [] if settings.rollout_only else [(Component.TRAIN_WEIGHTS, weight_bytes)]
        if settings.trainable:
            sizes += [(Component.GRADIENTS, weight_bytes), (Component.OPTIMIZER, 2 * weight_bytes)]
        self.regions: dict[Component, Region] = {component: device.region(size) for component, size in sizes}
        sizes.append((Component.ROLLOUT_WEIGHTS, slot_bytes))
        self.settings = settings
        self.layout = state_layout(sizes, trainer.parameter_count)
        self.ledger = ComponentLedger(deployment_id, self.layout)
        self.image: ByteArray | None = None
        self.preloaded: Preloaded | None = None
        self.content_key = ""
        self.tokenizer = None if settings.tokenizer_file is None else Tokenizer.from_file(settings.tokenizer_file)
        self._element_count = trainer.element_count

    def flat(self, component: Component) -> torch.Tensor:
        """A component as flat float32 (the optimizer: see `moments`)."""
        return self.regions[component].pieces[0].view(torch.float32)[: self._element_count]

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Adam's first and second moment, flat float32."""
        first, second = self.regions[Component.OPTIMIZER].pieces[0].view(torch.float32).chunk(2)
        return first[: self._element_count], second[: self._element_count]

    def rollout_content(self) -> RolloutContent:
        """What is in the generator's slot while this deployment owns it."""
        return RolloutContent(self.ledger.deployment_id, self.ledger.rollout_version, self.content_key)

    def place(self, component: Component) -> ByteArray:
        """A component's bytes in the host image. Raises InvalidArgument while there is no image."""
        if self.image is None:
            raise InvalidArgument(f"{self.ledger.deployment_id} has no host image: attach one first")
        place = self.ledger.place(component)
        return self.image[place.offset : place.offset + place.size_bytes]
