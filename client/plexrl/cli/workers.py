"""`plexrl workers`: workers and what they hold."""

import argparse

from plexrl.cli import options
from plexrl.v1 import admin_pb2 as a
from plexrl.v1 import types_pb2 as t


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `workers` to the subcommands."""
    parser = subparsers.add_parser(
        "workers", help="list workers and what they hold", description="List workers and what they hold."
    )
    parser.set_defaults(run=run)
    options.add_json_argument(parser)
    options.add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    with options.connection(args) as connection:
        workers = connection.unary(connection.admin.ListWorkers, a.ListWorkersRequest()).workers
    if args.json:
        options.show_json(workers)
        return 0
    columns = (
        "WORKER",
        "NAME",
        "STATE",
        "ADDRESS",
        "DEVICE",
        "ON DEVICE|",
        "PARKED|",
        "MODELS|",
        "SERVES",
        "LABELS",
        "MESSAGE",
    )
    options.show_table(columns, [_row(worker) for worker in workers], "no workers: `plexrl up` starts some here")
    return 0


def _row(worker: a.Worker) -> list[str]:
    limits = worker.capabilities
    on_device = _held(worker, t.TIER_DEVICE)
    parked = _held(worker, t.TIER_HOST)
    return [
        worker.worker_id,
        worker.name,
        options.state_name(a.WorkerState.Name(worker.state), "WORKER_STATE_"),
        worker.address,
        limits.device_name,
        f"{options.file_size(on_device)} of {options.file_size(limits.device_state_bytes)}",
        f"{options.file_size(parked)} of {options.file_size(limits.host_state_bytes)}",
        str(len(worker.deployments)),
        worker.serving_job_id or "-",
        " ".join(f"{key}={value}" for key, value in sorted(worker.labels.items())),
        worker.message,
    ]


def _held(worker: a.Worker, tier: "t.Tier.ValueType") -> int:
    components = (component for deployment in worker.deployments for component in deployment.residency)
    return sum(component.size_bytes for component in components if component.tier == tier)
