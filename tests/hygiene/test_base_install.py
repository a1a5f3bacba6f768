"""The base install is the client alone: importing it loads nothing of the server side."""

import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SERVER_SIDE = (
    "torch",
    "vllm",
    "transformers",
    "sqlalchemy",
    "asyncpg",
    "alembic",
    "structlog",
    "plexrl_controller",
    "plexrl_worker",
)


def test_importing_the_client_loads_no_server_side() -> None:
    program = f"import sys, plexrl; print([name for name in {SERVER_SIDE!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "[]"


def test_the_client_runs_with_only_the_base_dependencies(tmp_path: Path) -> None:
    """The imports of the client and its commands succeed with every package hidden that the base install lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = _closure({Requirement(line).name for line in project["dependencies"]})
    program = f"""
import importlib.abc, importlib.metadata, sys
allowed = {sorted(allowed)!r}
owners = importlib.metadata.packages_distributions()
class OnlyBase(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        names = [owner.lower().replace("_", "-") for owner in owners.get(top, [])]
        if names and not set(names) & set(allowed):
            raise ModuleNotFoundError(f"{{name}} is not part of the base install", name=name)
        return None
sys.meta_path.insert(0, OnlyBase())
import plexrl
import plexrl.cli.main
print("ok")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, "ok"), result.stderr


def _closure(names: set[str]) -> set[str]:
    """Every distribution that installing `names` brings, `plexrl` included."""
    seen: set[str] = {"plexrl"}
    todo = list(names)
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        for line in requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return seen
