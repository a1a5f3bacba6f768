"""Which device an engine child sees."""

import pytest

from plexrl_worker.errors import EngineFailed
from plexrl_worker.supervisor import device_environment


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [
        ("cpu", None, ""),
        ("cpu", "0,1", ""),
        ("cuda:0", None, "0"),
        ("cuda:3", None, "3"),
        ("cuda:0", "5", "5"),
        ("cuda:1", "5,7", "7"),
        ("cuda:1", " GPU-1f, GPU-2e ", "GPU-2e"),
    ],
)
def test_an_engine_sees_the_device_that_its_daemon_was_told_and_no_other(
    device: str, visible: str | None, seen: str
) -> None:
    """Indexes count within what the daemon itself sees: a unit per GPU shows each daemon one, as number 0."""
    assert device_environment(device, visible) == {"CUDA_VISIBLE_DEVICES": seen}


def test_a_device_that_the_daemon_does_not_see_is_refused() -> None:
    with pytest.raises(EngineFailed, match="--device cuda:1: CUDA_VISIBLE_DEVICES='5' shows 1 device"):
        device_environment("cuda:1", "5")
