"""G09: swaps and calls on the real engine leave every process's memory where it was. `make soak` is the long form."""

from pathlib import Path

import pytest

from benchmarks.soak import BOUND_BYTES, lines_of, soak
from benchmarks.worker_process import qwen3, running


@pytest.mark.long
async def test_forty_swaps_leave_every_process_within_its_bound(tmp_path: Path) -> None:
    """Host memory holds two of the three models, so that swaps go through the disk as well."""
    config = qwen3(128, 2)
    flags = ("--host-state-bytes", "16M", "--disk-state-bytes", "1G", "--kv-cache-bytes", "16M")
    async with running(tmp_path, *flags, threads=1, log=tmp_path / "worker.log") as worker:
        samples = await soak(worker, [config] * 3, swaps=40, calls_per_swap=5, limit_s=0.0)
        status = await worker.status()
    lines = lines_of(samples)
    assert {line.process for line in lines} == {"daemon", "engine-0"}
    assert all(line.flat for line in lines), lines
    assert max(line.highest_bytes - line.first_bytes for line in lines) <= 2 * BOUND_BYTES
    assert status.tiers.loads_from_disk > 20
    assert status.tiers.engines_replaced == 0
    assert status.engines[0].residue_bytes < 256 << 20
