"""What a process holds of main memory, as the kernel counts it. Without torch, so that the fake engine has it too."""

from pathlib import Path

from plexrl_worker.engine.errors import EngineError


def anonymous_bytes(process: str = "self") -> int:
    """Anonymous resident memory of a process; host images are shared memory and do not count."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise EngineError("/proc/self/smaps_rollup has no line 'Anonymous:'")
