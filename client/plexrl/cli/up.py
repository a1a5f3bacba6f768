"""`plexrl up`: a whole cluster on this machine, for as long as the command runs.

The flags are known to the client alone; the launcher comes with the `controller` extra and is imported when it runs.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plexrl_controller.embedded.settings import ClusterSettings

DESCRIPTION = """Starts a private Postgres, a controller and workers on this machine, watches them, and stops
them on Ctrl-C. Everything is kept in one folder, where the next start finds it again."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `up` to the subcommands of `plexrl`; the parsed options carry `run`, which returns the exit code."""
    parser = subparsers.add_parser("up", help="start a cluster on this machine", description=DESCRIPTION)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="workers to start (default: 1)")
    parser.add_argument("--data-dir", type=Path, default=Path(".plexrl"), metavar="DIR", help="default: .plexrl")
    parser.add_argument(
        "--database-url", metavar="URL", help="your own Postgres, postgresql+asyncpg://…, instead of a private one"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: worker i takes CUDA device i")
    parser.add_argument("--device-state-bytes", metavar="BYTES", help="model state that a device may hold, such as 2G")
    parser.add_argument("--host-state-bytes", metavar="BYTES", help="parked model state that a worker may hold")
    parser.add_argument("--kv-cache-bytes", metavar="BYTES", help="KV cache of one engine, such as 256M")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads of one worker (default: its share)")
    parser.add_argument(
        "--policy",
        choices=("las", "hrrs", "fifo", "hold"),
        default="hrrs",
        help="who comes next: least attained service, highest response ratio or first come; hold: through all stalls",
    )
    parser.add_argument(
        "--catalogue-file",
        type=Path,
        metavar="FILE",
        help='TOML file of NAME = "DIRECTORY": models that jobs may name',
    )
    parser.add_argument(
        "--metrics-listen", metavar="HOST:PORT", help="where the controller serves Prometheus metrics, off unless given"
    )
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs until Ctrl-C. Returns 0 after a clean stop, and 1, the reason printed, when the cluster could not start."""
    try:
        from plexrl_controller.embedded.foreground import run as run_supervisor
        from plexrl_controller.embedded.process import EmbeddedError
        from plexrl_controller.embedded.settings import ClusterSettings
    except ModuleNotFoundError as error:
        print(f"`plexrl up` needs {error.name}: pip install 'plexrl[controller,worker,cpu]'", file=sys.stderr)
        return 1
    try:
        settings = ClusterSettings(
            data_dir=options.data_dir,
            workers=options.workers,
            database_url=options.database_url,
            device=options.device,
            device_state_bytes=options.device_state_bytes,
            host_state_bytes=options.host_state_bytes,
            kv_cache_bytes=options.kv_cache_bytes,
            threads=options.threads,
            engine=options.engine,
            policy=options.policy,
            catalogue_file=options.catalogue_file,
            controller_flags=("--metrics-listen", options.metrics_listen) if options.metrics_listen else (),
        )
    except EmbeddedError as error:
        print(error, file=sys.stderr)
        return 1
    print("starting: the first time takes some seconds …", flush=True)
    return run_supervisor(settings, _say, lambda endpoint: _greet(settings, endpoint))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _greet(settings: "ClusterSettings", endpoint: str) -> None:
    workers = "1 worker" if settings.workers == 1 else f"{settings.workers} workers"
    here = settings.data_dir == Path(".plexrl")
    token_file = settings.data_dir / "token"
    connect = "plexrl.connect()" if here else f'plexrl.connect("{endpoint}", token_file="{token_file}")'
    environment = "" if here else f"PLEXRL_ENDPOINT={endpoint} PLEXRL_TOKEN_FILE={token_file} "
    print(
        f"PlexRL is up at {endpoint} with {workers}; token in {token_file}, logs in {settings.data_dir / 'logs'}.\n"
        f"In another terminal{', in this folder' if here else ''}:\n"
        f"  {environment}plexrl workers\n"
        f"  python -c 'import plexrl; print({connect})'\n"
        "Ctrl-C stops everything.",
        flush=True,
    )
