"""The grpcurl recipes of docs/operations.md, run as they stand against a running cluster."""

import os
import re
import subprocess
import sys
from pathlib import Path

from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- expect: (?P<expect>.*?) -->\n)?```sh\n(?P<script>.*?)```", re.DOTALL)
BETWEEN = "-- end of recipe --"


def recipes() -> list[tuple[str, str]]:
    """(script, words that its output must hold), in order; later recipes use the variables of earlier ones."""
    text = (ROOT / "docs" / "operations.md").read_text()
    return [(match["script"], match["expect"] or "") for match in BLOCK.finditer(text)]


def test_recipes_do_what_they_say(tmp_path: Path) -> None:
    written = recipes()
    assert len(written) >= 12
    script = "\n".join(f"{script}\necho '{BETWEEN}'" for script, _ in written)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with LocalCluster(ClusterSettings(data_dir=tmp_path / ".plexrl", engine="fake", threads=1)):
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    outputs = result.stdout.split(f"{BETWEEN}\n")
    for (script, expect), output in zip(written, outputs, strict=False):
        assert expect in output, f"{script}\nprinted\n{output}"
