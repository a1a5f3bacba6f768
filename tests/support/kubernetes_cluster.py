"""Clusters for tests of the simulated Kubernetes API: objects to put in, and `kubectl` to look at them with."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

KUBECTL = Path(sys.executable).parent / "kubectl"


def deployment(name: str = "web", replicas: int = 3, image: str = "nginx:1.27", **spec: Any) -> dict[str, Any]:
    """A deployment that a cluster accepts."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod_spec(image)},
            **spec,
        },
    }


def pod_spec(image: str = "nginx:1.27", **spec: Any) -> dict[str, Any]:
    return {"containers": [{"name": "main", "image": image}], **spec}


def pod(name: str = "one", **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec(**spec)}


def job(name: str = "sum", annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"annotations": annotations or {}}, "spec": pod_spec(restartPolicy="Never")}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"template": template, **spec},
    }


# What kubectl logs of its own working, such as that it hung up on a watch that it no longer needs, is no answer.
LOGGED = re.compile(r"^[IWE]\d{4} \d\d:\d\d:.*\n", re.MULTILINE)


class Kubectl:
    """The real kubectl against a server, in a home of its own."""

    def __init__(self, url: str, home: Path) -> None:
        self._url = url
        self._home = home

    def __call__(self, *arguments: str, status: int = 0, stdin: str | None = None, timeout_s: float = 30) -> str:
        """What it answered, errors included. Fails when it ends with another exit status."""
        done = subprocess.run(
            [KUBECTL, "--server", self._url, *arguments],
            capture_output=True,
            text=True,
            input=stdin,
            env={"HOME": str(self._home), "PATH": os.environ["PATH"]},
            timeout=timeout_s,
            check=False,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == status, f"kubectl {' '.join(arguments)}: {done.returncode}\n{printed}"
        return done.stdout + LOGGED.sub("", done.stderr)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """A command that goes on, such as a watch."""
        return subprocess.Popen(
            [KUBECTL, "--server", self._url, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"HOME": str(self._home), "PATH": os.environ["PATH"]},
        )
