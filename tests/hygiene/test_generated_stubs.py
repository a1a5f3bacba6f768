"""The committed stubs are what protos/ says."""

import filecmp
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_stubs_are_fresh(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [ROOT / ".ci" / "generate-stubs", tmp_path], check=True, capture_output=True, env={**os.environ, "PATH": path}
    )

    generated = {file.name: file for file in (tmp_path / "plexrl" / "v1").iterdir()}
    committed = {file.name: file for file in (ROOT / "client" / "plexrl" / "v1").glob("*_pb2*")}
    stale = [name for name, file in committed.items() if not filecmp.cmp(file, generated[name], shallow=False)]
    assert sorted(committed) == sorted(generated)
    assert stale == [], "run `make proto` and commit what it writes"
