"""What a worker says of a model: where its components are, its version and number, and what is left of a lost state."""

from collections.abc import Mapping

from plexrl.v1 import model_pb2 as m
from plexrl.v1 import registry_pb2 as r
from plexrl.v1 import types_pb2 as t
from plexrl_worker.deployment import Deployment
from plexrl_worker.engine.port import Component
from plexrl_worker.parked_files import DiskCopy
from plexrl_worker.residency import Copies


def of_deployment(
    deployment: Deployment, components: Mapping[Component, Copies], revision: int, *, on_disk: bool
) -> r.DeploymentStatus:
    """A model that is here. on_disk: what is parked of it would have to come from disk."""
    return r.DeploymentStatus(
        model_id=deployment.model_id,
        residency=[
            m.ComponentResidency(
                component=name,
                tier=_tier(copies, on_disk=on_disk),
                dirty=copies.dirty,
                size_bytes=copies.size_bytes,
            )
            for name, copies in components.items()
        ],
        weights_version=deployment.weights_version,
        applied_sequence=deployment.applied_sequence,
        state_lost=deployment.state_lost,
        host_image=deployment.state_lost and deployment.host_state is not None,
        host_image_sequence=deployment.host_state.applied_sequence if deployment.host_state else 0,
        host_image_weights_version=deployment.host_state.weights_version if deployment.host_state else 0,
        revision=revision,
    )


def of_kept(model_id: str, copy: DiskCopy | None, revision: int) -> r.DeploymentStatus:
    """A model that is not deployed: not here, or only as what an earlier life parked."""
    status = r.DeploymentStatus(model_id=model_id, revision=revision)
    if copy is not None:
        status.state_lost = status.host_image = True
        status.host_image_sequence = copy.facts.applied_sequence
        status.host_image_weights_version = copy.facts.weights_version
    return status


def _tier(copies: Copies, *, on_disk: bool) -> t.Tier.ValueType:
    if copies.on_device:
        return t.TIER_DEVICE
    if not copies.parked:
        return t.TIER_ABSENT
    return t.TIER_DISK if on_disk else t.TIER_HOST
