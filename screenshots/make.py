"""Makes the pictures in this folder from the running app over the simulated node.

    python screenshots/make.py

Starts the app headless, lets it capture from the simulated profiler server and saves the
screen as SVG at several sizes; the page of a snapshot as PNG, by Chromium where there is one.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from gputop.export.snapshot import write_snapshot
from gputop.session.session import Options, Session
from gputop.sources.simulated import SimulatedSource
from gputop.tui.app import GputopApp

HERE = Path(__file__).parent
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")


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
                await _until(lambda: not app.screen.has_class("-reading"))  # a timeline, of its trace
            await pilot.pause()
            (HERE / f"{name}.svg").write_text(app.export_screenshot(title="gputop"))
        session.close()
    print(f"{name}.svg")


async def _report(scenario: str, size: tuple[int, int]) -> None:
    """The snapshot of a session with a capture, its SVG as it is and its page as a browser shows it."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(SimulatedSource(scenario), Options(logdir=Path(folder), capture_s=3.0))
        session.start()
        await _until(lambda: session.sample is not None and session.servers)
        session.start_capture()
        await _until(lambda: session.status is not None and not session.status.running)
        paths = {path.suffix: path for path in write_snapshot(session, Path(folder))}
        session.close()
        (HERE / "snapshot.svg").write_text(paths[".svg"].read_text())
        print("snapshot.svg")
        browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
        if browser is None:
            print("no Chromium: report-1280.png is left as it is")
            return
        name = f"report-{size[0]}.png"
        subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
                        "--disable-background-networking", f"--user-data-dir={folder}/profile",
                        f"--window-size={size[0]},{size[1]}", f"--screenshot={HERE / name}", paths[".html"].as_uri()],
                       check=True, capture_output=True, timeout=120)
    print(name)


async def main() -> None:
    await _shoot("main-80x24", (80, 24), "gpu0-oversubscribed", capture=True)
    await _shoot("main-120x40", (120, 40), "input-bound", capture=True)
    await _shoot("main-200x50", (200, 50), "gpu0-oversubscribed", capture=True)
    await _shoot("finding-120x40", (120, 40), "input-bound", capture=True, keys=("enter",))
    await _shoot("timeline-120x40", (120, 40), "gpu0-oversubscribed", capture=True, keys=("t",))
    zoomed = ("t", "b", "escape", *("plus",) * 3, "n")
    await _shoot("timeline-zoomed-120x40", (120, 40), "launch-bound", capture=True, keys=zoomed)
    await _shoot("idle-gaps-120x40", (120, 40), "input-bound", capture=True, keys=("t", "b"))
    await _shoot("tables-120x40", (120, 40), "launch-bound", capture=True, keys=("T",))
    await _shoot("cursor-120x40", (120, 40), "input-bound", capture=True, keys=("v", *("left",) * 6))
    await _shoot("healthy-120x40", (120, 40), "healthy", capture=True)
    await _report("input-bound", (1280, 1880))


if __name__ == "__main__":
    asyncio.run(main())
