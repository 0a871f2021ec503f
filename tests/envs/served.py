"""Environments behind servers, as a run opens them, and where the Pythons with other people's servers are."""

import asyncio
import contextlib
import os
import pathlib
import subprocess
import threading

import pytest

from jaxagent.envs.base import Opening


@contextlib.contextmanager
def opened(environment, tasks=(), notes=None):
    """What a run does: one loop for everything, in a thread of its own. Yields the attempts' maker and `run`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine, timeout_s=120):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)

    try:
        note = (lambda line: None) if notes is None else notes.append
        with environment.open(Opening(None, tasks, run, note)) as attempt_at:
            yield attempt_at, run
        assert run(_leftover()) == []
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _leftover():
    await asyncio.sleep(0.05)
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@contextlib.asynccontextmanager
async def web_server(app):
    """An aiohttp application on a free port; yields its URL."""
    from aiohttp import web

    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


def python_of(variable: str, *modules: str) -> str:
    """The interpreter that a variable names. Skips, with the reason, where it has not these modules."""
    python = os.environ.get(variable, "")
    if not python or not pathlib.Path(python).is_file():
        pytest.skip(f"{variable} names no Python with {', '.join(modules)}")
    look = f"import importlib.util as u; print([m for m in {list(modules)!r} if u.find_spec(m) is None])"
    missing = subprocess.run([python, "-c", look], capture_output=True, text=True, timeout=60).stdout.strip()
    if missing != "[]":
        pytest.skip(f"{variable}={python} has no {missing}")
    return python
