"""G21: what is heard late, of orders and calls of before a state was lost, is not taken for what was ordered since."""

from plexrl.v1 import registry_pb2, worker_pb2
from plexrl_controller.dispatch import snapshots
from plexrl_controller.dispatch.replay_log import RecoveryPolicy
from plexrl_controller.domain.ids import CallId
from plexrl_controller.domain.records import Model
from plexrl_controller.domain.states import CallState, ModelState
from tests.support import specs
from tests.support.leader import Leader, running_leader


async def hear(leader: Leader, *reports: worker_pb2.Report) -> None:
    """The worker's stream brings reports."""
    assert leader.worker_id is not None
    incarnation = leader.core.ledger.workers[leader.worker_id].incarnation
    await leader.dispatcher.reports_came(leader.worker_id, incarnation, reports)
    await leader.settle()


def gone(model: Model) -> registry_pb2.DeploymentStatus:
    """The engine died with the newest state."""
    return registry_pb2.DeploymentStatus(model_id=model.model_id, state_lost=True)


async def reopen(leader: Leader, model: Model) -> None:
    """The stream breaks, and the next one says that the state is lost."""
    assert leader.worker_id is not None
    worker = leader.core.ledger.workers[leader.worker_id]
    leader.dispatcher.stream_closed(worker.worker_id, worker.incarnation)
    status = worker_pb2.WorkerStatus(deployments=[gone(model)])
    await leader.dispatcher.stream_opened(worker.worker_id, worker.incarnation, status)
    await leader.settle()


def deploys(leader: Leader) -> list[worker_pb2.Order]:
    """Orders that wait at the worker."""
    return [order for order in leader.worker.queue if order.HasField("deploy")]


async def test_a_call_that_is_heard_of_while_its_state_is_restored_does_not_block_the_next() -> None:
    """One that changes nothing is not executed again: the restored state must stand behind it all the same."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.forward_backward(), 1)
        await leader.work()
        await snapshots.order(leader.core, leader.core.ledger.models[model.model_id])
        await leader.work()
        saved = await leader.submit(model, specs.save("kept"), 2)
        await leader.settle()
        reports = leader.worker.run()
        await hear(leader, *[report for report in reports if not report.HasField("call")])
        await hear(leader, worker_pb2.Report(deployments=[gone(model)]))
        assert len(deploys(leader)) == 1
        await hear(leader, *[report for report in reports if report.HasField("call")])
        await leader.work()
        scored = await leader.submit(model, specs.score(), 3)
        await leader.work()
        states = [leader.core.ledger.calls[CallId(call.call_id)].state for call in (saved, scored)]
        assert states == [CallState.SUCCEEDED] * 2
        assert leader.core.ledger.calls[CallId(scored.call_id)].lost_attempts == 0


async def test_checkpoints_that_are_heard_of_while_an_older_copy_is_restored_take_nothing_from_its_log() -> None:
    """The older copy needs what came after it, although the newer ones have that in them."""
    async with running_leader() as leader:
        # No room for more than the newest copy needs.
        leader.core.recovery_policy = RecoveryPolicy(log_bytes=40)
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.forward_backward(), 1)
        await leader.work()
        await leader.submit(model, specs.save("kept"), 2)
        await leader.submit(model, specs.save("kept-too"), 3)
        await leader.submit(model, specs.forward_backward(), 4)
        await leader.settle()
        reports = leader.worker.run()
        await hear(leader, *[report for report in reports if not report.HasField("call")])
        await hear(leader, worker_pb2.Report(deployments=[gone(model)]))
        assert len(deploys(leader)) == 1
        leader.worker.models.clear()
        await hear(leader, *[report for report in reports if report.HasField("call")])
        await leader.work()
        assert leader.core.ledger.models[model.model_id].state is ModelState.PLACED
        assert leader.worker.models[model.model_id].state == (1, 4)
        # Once the state is there, the next copy makes the log short again.
        await leader.submit(model, specs.save("again"), 5)
        await leader.work()
        assert leader.core.ledger.models[model.model_id].log_start > 0


async def test_a_load_that_is_heard_of_before_the_call_before_it_while_an_older_copy_is_restored() -> None:
    """The older copy needs what the load makes needless: the late call would be executed again on another state."""
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.forward_backward(), 1)
        await leader.work()
        late = await leader.submit(model, specs.forward_backward(), 2)
        heard = await leader.submit(model, specs.forward_backward(), 3)
        load = await leader.submit(model, specs.load(), 4)
        await leader.settle()
        by_call = {report.call.call_id: report for report in leader.worker.run() if report.HasField("finished")}
        await hear(leader, by_call[heard.call_id])
        leader.worker.models.clear()
        await hear(leader, worker_pb2.Report(deployments=[gone(model)]))
        assert len(deploys(leader)) == 1
        await hear(leader, by_call[load.call_id], by_call[late.call_id])
        await leader.work()
        calls = [leader.core.ledger.calls[CallId(call.call_id)] for call in (late, heard, load)]
        assert [call.state for call in calls] == [CallState.SUCCEEDED] * 3
        assert leader.core.ledger.models[model.model_id].state is ModelState.PLACED
        assert leader.core.replay_divergences == 0
        assert leader.worker.models[model.model_id].state == (), "what was loaded is the base"


async def test_only_the_newest_order_to_restore_a_state_says_that_it_is_there() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.forward_backward(), 1)
        await leader.work()
        await hear(leader, worker_pb2.Report(deployments=[gone(model)]))
        (older,) = deploys(leader)
        leader.worker.queue.clear()
        await reopen(leader, model)
        assert len(deploys(leader)) == 1
        built = worker_pb2.OrderFinished(deployed=worker_pb2.DeployedModel(state_bytes=1000))
        await hear(leader, worker_pb2.Report(order_id=older.order_id, finished=built))
        assert leader.core.ledger.models[model.model_id].state is ModelState.RECOVERING
        assert len(leader.worker.queue) == 1, "nothing is executed on what the older order made, or ordered once more"
        await leader.work()
        assert leader.core.ledger.models[model.model_id].state is ModelState.PLACED
        assert leader.worker.models[model.model_id].state == (1,)


async def test_a_stream_that_opens_orders_a_lost_state_to_be_restored_once() -> None:
    async with running_leader() as leader:
        await leader.join()
        model = await leader.model(await leader.job())
        await leader.submit(model, specs.forward_backward(), 1)
        await leader.work()
        await reopen(leader, model)
        assert len(deploys(leader)) == 1
        await leader.work()
        assert leader.worker.models[model.model_id].state == (1,)
