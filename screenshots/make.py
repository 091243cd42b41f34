"""Makes the pictures in this folder from the running app over the simulated node.

    python screenshots/make.py [NAME…]      only the pictures with these names, such as idle-gaps-120x40

Starts the app headless, lets it capture from the simulated profiler server, waits until nothing on the screen is
pending and saves the screen as SVG at several sizes; the page of a snapshot as PNG, by Chromium where there is one.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from gputop.export.snapshot import write_snapshot
from gputop.session.session import Options, Session
from gputop.sources.simulated import SimulatedSource
from gputop.telemetry.sampler import OwnCpu
from gputop.tui.app import GputopApp
from gputop.tui.timeline.canvas import TimelineCanvas

HERE = Path(__file__).parent
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")


async def _until(done: Callable[[], object]) -> None:
    """Let the app run until ``done()`` holds."""
    for _ in range(1200):
        await asyncio.sleep(0.05)
        if done():
            return
    raise SystemExit("the app did not get there within a minute")


def _complete(app: GputopApp) -> bool:
    """Nothing on the screen is still being read: of a timeline neither its rows nor its idle gaps."""
    timelines = [canvas.timeline for canvas in app.screen.query(TimelineCanvas)]
    return not any(timeline is None or timeline.pending for timeline in timelines)


async def _shoot(name: str, size: tuple[int, int], scenario: str, keys: tuple[str, ...] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        session = Session(SimulatedSource(scenario), Options(logdir=Path(folder), capture_s=3.0))
        app = GputopApp(session)
        async with app.run_test(size=size, notifications=False) as pilot:
            await _until(lambda: session.feed.sample is not None and session.watch.servers)
            await pilot.press("c")
            await _until(lambda: session.control.status is not None and not session.control.status.running)
            await pilot.pause()
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
                await _until(lambda: _complete(app))
            await pilot.pause()
            (HERE / f"{name}.svg").write_text(app.export_screenshot(title="gputop"))
        session.close()
    print(f"{name}.svg")


async def _report(scenario: str, size: tuple[int, int]) -> None:
    """The page of a session with a capture, as a browser shows it."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(SimulatedSource(scenario), Options(logdir=Path(folder), capture_s=3.0))
        session.start()
        await _until(lambda: session.feed.sample is not None and session.watch.servers)
        session.start_capture(session.control.request())
        await _until(lambda: session.control.status is not None and not session.control.status.running)
        paths = {path.suffix: path for path in write_snapshot(session, Path(folder))}
        session.close()
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


_ZOOMED = ("t", "b", "escape", *("plus",) * 3, "n")
PICTURES: dict[str, tuple[tuple[int, int], str, tuple[str, ...]]] = {  # by name: size, scenario, keys after a capture
    "main-80x24": ((80, 24), "gpu0-oversubscribed", ()),
    "main-120x40": ((120, 40), "input-bound", ()),
    "main-200x50": ((200, 50), "gpu0-oversubscribed", ()),
    "finding-120x40": ((120, 40), "input-bound", ("enter",)),
    "timeline-120x40": ((120, 40), "gpu0-oversubscribed", ("t",)),
    "timeline-zoomed-120x40": ((120, 40), "launch-bound", _ZOOMED),
    "idle-gaps-120x40": ((120, 40), "input-bound", ("t", "b")),
    "tables-120x40": ((120, 40), "launch-bound", ("T",)),
    "cursor-120x40": ((120, 40), "input-bound", ("v", *("left",) * 6)),
    "healthy-120x40": ((120, 40), "healthy", ()),
}


async def main(names: list[str]) -> None:
    if unknown := set(names) - {*PICTURES, "report"}:
        raise SystemExit(f"no picture is named {', '.join(sorted(unknown))}: choose from {', '.join(PICTURES)}, report")
    # Headless on a busy machine, beside the simulated job: what this process takes is not what the monitor takes.
    OwnCpu.ratio = lambda *_: None  # type: ignore[method-assign]
    for name in names or [*PICTURES, "report"]:
        if name == "report":
            await _report("input-bound", (1280, 1880))
        else:
            await _shoot(name, *PICTURES[name])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
