"""Which machine this is, for what holds on one machine type only: bit-equal replay. Touches no device."""

import platform
from collections.abc import Mapping
from pathlib import Path

from plexrl_worker.engine.port import EngineDescription

_GPU_FACTS = Path("/proc/driver/nvidia/gpus")
_CPU_FACTS = Path("/proc/cpuinfo")
_MACHINE_TYPE, _THREADS = "machine type", "number of threads"
_OF_REPLAY_ALONE = frozenset({_MACHINE_TYPE, _THREADS})


def machine_type(device: str) -> str:
    """The processor's model for `cpu`, the accelerators' for `cuda:N`, as the kernel and the driver name them."""
    processor = f"{platform.machine()} {_field(_CPU_FACTS, 'model name') or platform.processor() or 'unknown'}"
    if device == "cpu":
        return processor
    models = sorted({_field(facts, "Model") for facts in _GPU_FACTS.glob("*/information")} - {""})
    return " + ".join(models) if models else f"{device} on {processor}"


def conditions(machine: str, configuration_sha256: str, description: EngineDescription) -> Mapping[str, str]:
    """What must be equal where a snapshot is restored, name to value.

    Libraries count: the layout of a state and the last bits of its numbers are theirs.
    """
    return {
        _MACHINE_TYPE: machine,
        "model configuration": configuration_sha256,
        "architecture": description.architecture,
        "precision": description.precision.value,
        "kind of device": description.device_kind,
        _THREADS: str(description.threads),
        **{f"version of {name}": version for name, version in description.library_versions.items()},
    }


def weight_conditions(conditions: Mapping[str, str]) -> Mapping[str, str]:
    """Those of the conditions of a state that must also be equal where its rollout weights alone are used."""
    return {name: value for name, value in conditions.items() if name not in _OF_REPLAY_ALONE}


def _field(path: Path, name: str) -> str:
    """The first `name : value` of a kernel's table; empty when there is none."""
    try:
        for line in path.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return " ".join(value.split())
    except OSError:
        pass
    return ""
