"""Whether a controller serves and its workers are ready, asked over the wire as any client would."""

import time
from collections.abc import Callable, Collection

import grpc
from grpc_health.v1 import health_pb2

from plexrl.v1 import admin_pb2, admin_pb2_grpc
from plexrl_controller.embedded.process import EmbeddedError

RPC_TIMEOUT_S = 2.0
POLL_S = 0.05
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def wait_until_ready(
    endpoint: str, token: str, worker_names: Collection[str], timeout_s: float, check: Callable[[], None]
) -> None:
    """Returns once the controller at `endpoint` is SERVING and every named worker READY.

    `check` is called between two looks and may raise to give up, for one when a process has died.
    Raises EmbeddedError after `timeout_s`, saying what was still missing.
    """
    deadline = time.monotonic() + timeout_s
    missing = f"the controller at {endpoint}"
    # A fresh channel per look: one that has failed to connect waits longer and longer before it tries again.
    while time.monotonic() < deadline:
        check()
        with grpc.insecure_channel(endpoint, [("grpc.enable_http_proxy", 0)]) as channel:
            missing = _missing(channel, endpoint, token, worker_names)
        if not missing:
            return
        time.sleep(POLL_S)
    raise EmbeddedError(f"not ready after {timeout_s:.0f} s: {missing}")


def _missing(channel: grpc.Channel, endpoint: str, token: str, worker_names: Collection[str]) -> str:
    try:
        check_health = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        health = check_health(health_pb2.HealthCheckRequest(), timeout=RPC_TIMEOUT_S)
        if health.status != health_pb2.HealthCheckResponse.SERVING:
            return f"the controller at {endpoint} is {health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)}"
        listed = admin_pb2_grpc.AdminServiceStub(channel).ListWorkers(
            admin_pb2.ListWorkersRequest(), timeout=RPC_TIMEOUT_S, metadata=(("authorization", f"Bearer {token}"),)
        )
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() not in _PASSING:
            raise EmbeddedError(f"{endpoint} refuses: {error.code().name}: {error.details()}") from error
        return f"the controller at {endpoint}"
    ready = {worker.name for worker in listed.workers if worker.state == admin_pb2.WORKER_STATE_READY}
    waiting = sorted(set(worker_names) - ready)
    return f"workers {', '.join(waiting)}" if waiting else ""
