"""Sessions of a whole leader and their calls, for tests: opened, submitted to, read."""

from plexrl.v1 import call_pb2, session_pb2, worker_pb2
from plexrl_controller.api.sessions import SessionService
from plexrl_controller.domain.records import Call, Model
from plexrl_controller.domain.states import CallState
from tests.support import specs
from tests.support.leader import Leader


async def one_model(leader: Leader) -> Model:
    await leader.join()
    return await leader.model(await leader.job())


async def opened(leader: Leader, model: Model, max_concurrent: int = 4, grace_s: int = 2) -> str:
    request = session_pb2.OpenSessionRequest(
        request_id=f"open-{next(leader._keys)}", model_id=model.model_id, max_concurrent=max_concurrent
    )
    request.grace.seconds = grace_s
    return (await SessionService(leader.core).OpenSession(request, None)).session_id


async def submitted(leader: Leader, model: Model, session_id: str, count: int) -> list[call_pb2.Call]:
    calls = [await leader.submit(model, specs.generate(), session_id=session_id) for _ in range(count)]
    await leader.settle()
    return calls


async def session(leader: Leader, session_id: str) -> session_pb2.Session:
    return await SessionService(leader.core).GetSession(session_pb2.GetSessionRequest(session_id=session_id), None)


def record(leader: Leader, call: call_pb2.Call) -> Call:
    return leader.call(call.call_id)


def states(leader: Leader, calls: list[call_pb2.Call]) -> list[CallState]:
    return [record(leader, call).state for call in calls]


def runs(leader: Leader) -> list[worker_pb2.RunCallOrder]:
    return [order.run_call for order in leader.transport.sent if order.HasField("run_call")]
