"""Processor time of a set of processes, from /proc: what a call costs, whoever else uses the machine."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Process ids of all children and their children."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


class ProcessorTime:
    """User and system time of named groups of processes since this object was made."""

    def __init__(self, groups: Mapping[str, Sequence[int]]) -> None:
        self._begun = {name: {pid: _seconds(pid) for pid in pids} for name, pids in groups.items()}

    def spent_s(self) -> dict[str, float]:
        """Seconds by group; a process that has ended counts nothing."""
        return {
            name: sum(max(0.0, _seconds(pid) - before) for pid, before in pids.items())
            for name, pids in self._begun.items()
        }


def _seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
