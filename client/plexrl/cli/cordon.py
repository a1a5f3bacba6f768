"""`plexrl cordon WORKER` and `plexrl uncordon WORKER`: whether a worker is given new models."""

import argparse

from plexrl import errors
from plexrl.cli import options
from plexrl.connection import Connection
from plexrl.v1 import admin_pb2 as a


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `cordon` and `uncordon` to the subcommands."""
    for name, what in (
        ("cordon", "give a worker no new models; those it has stay"),
        ("uncordon", "give a worker new models again"),
    ):
        parser = subparsers.add_parser(name, help=what, description=f"{what.capitalize()}.")
        parser.set_defaults(run=run, cordon=name == "cordon")
        parser.add_argument("worker", metavar="WORKER", help="its name or id, as `plexrl workers` shows them")
        options.add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    with options.connection(args) as connection:
        worker_id = _worker_id(connection, args.worker)
        if args.cordon:
            worker = connection.unary(connection.admin.CordonWorker, a.CordonWorkerRequest(worker_id=worker_id))
        else:
            worker = connection.unary(connection.admin.UncordonWorker, a.UncordonWorkerRequest(worker_id=worker_id))
    print(f"{worker.name} is {options.state_name(a.WorkerState.Name(worker.state), 'WORKER_STATE_')}")
    return 0


def _worker_id(connection: Connection, name_or_id: str) -> str:
    workers = connection.unary(connection.admin.ListWorkers, a.ListWorkersRequest()).workers
    for worker in workers:
        if name_or_id in (worker.name, worker.worker_id):
            return worker.worker_id
    raise errors.NotFound(f"no worker {name_or_id!r}: there are {', '.join(w.name for w in workers) or 'none'}")
