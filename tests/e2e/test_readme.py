"""The job of the README does what the README says, on real vLLM and torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

from plexrl_controller.embedded.cluster import LocalCluster
from plexrl_controller.embedded.settings import ClusterSettings

README = Path(__file__).parents[2] / "README.md"


def test_the_job_of_the_readme_learns(tmp_path: Path) -> None:
    job = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert len(job.splitlines()) <= 30
    with LocalCluster(ClusterSettings(data_dir=tmp_path / ".plexrl", threads=1)):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PLEXRL_")}
        ran = subprocess.run([sys.executable, "-c", job], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", ran.stdout)]
    assert len(rewards) == 20
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.8
