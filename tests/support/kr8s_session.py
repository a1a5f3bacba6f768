"""A program that uses a cluster by way of kr8s, in a process of its own: what kr8s leaves behind ends with it.

Run as `python -m tests.support.kr8s_session URL KUBECONFIG`; it fails where the cluster does not do as a real one does.
"""

import asyncio
import http.client
import json
import sys
from typing import Any

import kr8s
import kr8s.asyncio
from kr8s.asyncio.objects import Pod
from kr8s.objects import Deployment, Job

from tests.support.kubernetes_cluster import deployment, job, pod


def advance(url: str, seconds: float) -> None:
    """Lets the cluster's time pass."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("POST", "/plexrl/clock", json.dumps({"advanceSeconds": seconds}))
    assert connection.getresponse().status == 200
    connection.close()


def work(url: str, kubeconfig: str) -> None:
    """Creates, scales, patches, selects, waits and deletes."""
    api: Any = kr8s.api(url=url, kubeconfig=kubeconfig, namespace="default")
    assert api.version()["major"] == "1"
    item = Deployment(deployment(replicas=2), api=api)
    item.create()
    assert not item.ready()
    advance(url, 30)
    assert item.ready()
    assert len(item.pods()) == 2
    item.scale(3)
    advance(url, 30)
    assert item.ready()
    assert item.replicas == 3
    item.patch({"metadata": {"labels": {"team": "red"}}})
    assert [found.name for found in api.get("deployments", label_selector={"team": "red"})] == ["web"]
    item.delete()
    assert not item.exists()
    batch = Job(job(completions=2, parallelism=2), api=api)
    batch.create()
    advance(url, 300)
    batch.wait("condition=Complete")
    assert batch.status.succeeded == 2


async def follow(url: str, kubeconfig: str) -> None:
    """Watches a pod from its creation to its end."""
    api: Any = await kr8s.asyncio.api(url=url, kubeconfig=kubeconfig, namespace="default")
    events: list[tuple[str, str]] = []
    seen = asyncio.Event()

    async def collect() -> None:
        async for event, item in api.watch("pods", field_selector="metadata.name=one"):
            events.append((event, item.status.phase))
            seen.set()
            if event == "DELETED":
                return

    one: Any = await Pod(pod(), api=api)
    await one.create()
    task = asyncio.create_task(collect())
    await seen.wait()
    await asyncio.to_thread(advance, url, 10)
    await one.delete()
    await asyncio.to_thread(advance, url, 60)
    await asyncio.wait_for(task, 30)
    assert events[0] == ("ADDED", "Pending"), events
    assert events[-1] == ("DELETED", "Running"), events
    assert ("MODIFIED", "Running") in events


if __name__ == "__main__":
    work(*sys.argv[1:])
    asyncio.run(follow(*sys.argv[1:]))
    print("done")
