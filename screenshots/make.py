"""Makes the pictures in this folder from the running app over the simulated node.

    python screenshots/make.py

Starts the app headless, lets it capture from the simulated profiler server and saves the
screen as SVG at several sizes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from gputop.session import Options, Session
from gputop.sources.simulated import SimulatedSource
from gputop.tui.app import GputopApp

HERE = Path(__file__).parent


async def _until(done: Callable[[], object]) -> None:
    """Let the app run until ``done()`` holds."""
    for _ in range(1200):
        await asyncio.sleep(0.05)
        if done():
            return
    raise SystemExit("the app did not get there within a minute")


async def _shoot(name: str, size: tuple[int, int], scenario: str, *, capture: bool, keys: tuple[str, ...] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        session = Session(SimulatedSource(scenario), Options(logdir=Path(folder), capture_s=3.0))
        app = GputopApp(session)
        async with app.run_test(size=size, notifications=False) as pilot:
            await _until(lambda: session.sample is not None and session.servers)
            if capture:
                await pilot.press("c")
                await _until(lambda: session.status is not None and not session.status.running)
            await pilot.pause()
            for key in keys:
                await pilot.press(key)
            await pilot.pause()
            (HERE / f"{name}.svg").write_text(app.export_screenshot(title="gputop"))
        session.close()
    print(f"{name}.svg")


async def main() -> None:
    await _shoot("main-80x24", (80, 24), "gpu0-oversubscribed", capture=True)
    await _shoot("main-120x40", (120, 40), "input-bound", capture=True)
    await _shoot("main-200x50", (200, 50), "gpu0-oversubscribed", capture=True)
    await _shoot("finding-120x40", (120, 40), "input-bound", capture=True, keys=("enter",))
    await _shoot("capture-120x40", (120, 40), "launch-bound", capture=True, keys=("t",))
    await _shoot("healthy-120x40", (120, 40), "healthy", capture=True)


if __name__ == "__main__":
    asyncio.run(main())
