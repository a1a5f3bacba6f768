"""What a cluster of the fault matrix leaves behind when a promise was broken on it: its logs, and all that was durable.

Its folder goes with the test; this is what its reader needs to know why.
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.fault_rig import Rig

LIMIT_S = 60.0
_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"
_BACKENDS = """
SELECT row_to_json(a)::text FROM
    (SELECT pid, state, wait_event_type, wait_event, xact_start, left(query, 300) AS query FROM pg_stat_activity) AS a
"""
_UNFINISHED = "SELECT call_id FROM calls WHERE state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED') ORDER BY 1 LIMIT 50"


async def keep(made: "Rig", folder: Path) -> None:
    """Writes it into the folder, while the cluster still runs. What cannot be had is said; nothing is raised."""
    await asyncio.to_thread(_keep_logs, made.folder, folder)
    try:
        async with asyncio.timeout(LIMIT_S):
            await _keep_rows(made, folder)
            await _keep_explanations(made, folder)
    except Exception as error:  # noqa: BLE001
        print(f"not all of it could be kept: {error!r}")
    print(f"logs and rows of this cluster are in {folder}", flush=True)


def _keep_logs(cluster: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for pattern in ("*.log", "*.jsonl", "plexrl/**/*.log"):
        for file in cluster.glob(pattern):
            shutil.copy(file, folder / file.relative_to(cluster).as_posix().replace("/", "-"))


async def _keep_rows(made: "Rig", folder: Path) -> None:
    connection = made.database.connection
    (folder / "backends.jsonl").write_text("\n".join(row[0] for row in await connection.fetch(_BACKENDS)))
    for (table,) in await connection.fetch(_TABLES):
        rows = await connection.fetch(f'SELECT row_to_json(t)::text FROM (SELECT * FROM "{table}") AS t')
        (folder / f"rows-{table}.jsonl").write_text("\n".join(row[0] for row in rows))


async def _keep_explanations(made: "Rig", folder: Path) -> None:
    """What the controller, which has more than is durable, says of each call that has not ended."""
    told = {}
    connection = ("--endpoint", made.local.endpoint, "--token-file", str(made.local.folder.token_file))
    for (call_id,) in await made.database.connection.fetch(_UNFINISHED):
        explained = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "plexrl.cli.main", "explain", call_id, "--json", *connection),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        told[call_id] = (await explained.communicate())[0].decode(errors="replace")
    (folder / "explained.json").write_text(json.dumps(told, indent=1))
