"""The task of the procrastinate worker; its database is at BENCH_DATABASE (a libpq connection string)."""

import asyncio
import os

from procrastinate import App, JobContext, PsycopgConnector

app = App(connector=PsycopgConnector(conninfo=os.environ["BENCH_DATABASE"], min_size=2, max_size=8))


@app.task(name="echo", queue="bench", pass_context=True)
async def echo(context: JobContext, number: int, payload: str) -> None:
    """Tells whoever listens; procrastinate keeps no results."""
    await context.app.connector.execute_query_async("SELECT pg_notify('bench', %(number)s)", number=str(number))


async def main() -> None:
    """Serves until killed."""
    async with app.open_async():
        await app.run_worker_async(queues=["bench"], concurrency=64, install_signal_handlers=False)


if __name__ == "__main__":
    asyncio.run(main())
