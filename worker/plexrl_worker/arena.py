"""Host memory: one sealed memory file per deployment, owned by the daemon, so that no engine's death takes it along.

Knows bytes and the budget; what the bytes mean, and their checksums, come from the engine that parks there.
"""

import fcntl
import os
from dataclasses import dataclass

from plexrl_worker.errors import OverBudget

# Linux's fcntl command and seals, which Python's fcntl module does not name in every build.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4


@dataclass(frozen=True)
class HostImage:
    """Memory for a deployment's parked state."""

    fd: int
    size_bytes: int


class HostArena:
    """All parked states in host memory, within its budget. What leaves when there is no room, `tiers` decides."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._images: dict[str, HostImage] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes reserved for parked states."""
        return sum(image.size_bytes for image in self._images.values())

    def allocate(self, model_id: str, size_bytes: int) -> HostImage:
        """Reserves room for a deployment, which must not have any yet. Raises OverBudget."""
        if self.used_bytes + size_bytes > self._budget_bytes:
            raise OverBudget(
                f"model {model_id} needs {size_bytes} bytes of host memory, and {self.used_bytes} of this worker's "
                f"{self._budget_bytes} are in use: raise --host-state-bytes",
                metadata={
                    "needed_bytes": str(size_bytes),
                    "used_bytes": str(self.used_bytes),
                    "budget_bytes": str(self._budget_bytes),
                },
            )
        fd = os.memfd_create(f"plexrl-{model_id[:64]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            # Engines map this file: with its size sealed, none can turn another's access into a bus error.
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        except OSError:
            os.close(fd)
            raise
        self._images[model_id] = HostImage(fd, size_bytes)
        return self._images[model_id]

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._images

    def image(self, model_id: str) -> HostImage:
        """The image of a deployment; KeyError when it has none."""
        return self._images[model_id]

    def release(self, model_id: str) -> None:
        """Gives a deployment's memory back; releasing one that has none is fine."""
        image = self._images.pop(model_id, None)
        if image is not None:
            os.close(image.fd)

    def close(self) -> None:
        """Gives everything back."""
        for model_id in list(self._images):
            self.release(model_id)
