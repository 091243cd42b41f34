"""Makes demo.svg, the moving picture of the README: slow, cause, fix, faster, compared. ``python screenshots/loop.py``

The frames are the running app's own, over the simulated node. They are parts of one SVG, shown in turn by CSS; who
asks for less motion sees the second one.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

from make import HERE, _complete, _until

from gputop.session.session import Options, Session
from gputop.sources.simulated import SimulatedSource
from gputop.telemetry.sampler import OwnCpu
from gputop.tui.app import GputopApp

SIZE = (100, 30)
SECONDS = (3.0, 5.0, 6.0, 3.0, 6.0)  # for which each frame is shown
FASTER_S = 25.0  # of the fixed job in the lanes before it is captured


async def frames() -> list[str]:
    """The screens: before a capture, its finding, the details, the fixed job, the comparison."""
    shown: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        session = Session(SimulatedSource("input-bound"), Options(logdir=Path(folder), capture_s=3.0))
        app = GputopApp(session)
        async with app.run_test(size=SIZE, notifications=False) as pilot:

            async def shoot() -> None:
                await pilot.pause()
                await _until(lambda: _complete(app))
                shown.append(app.export_screenshot(title="gputop --demo input-bound"))

            async def capture() -> None:
                before = session.control.status
                await pilot.press("c")
                await _until(lambda: session.control.status is not before and session.control.status is not None
                             and not session.control.status.running)
                await pilot.pause()

            await _until(lambda: session.feed.sample is not None and session.watch.servers)
            await shoot()
            await capture()
            await shoot()
            await pilot.press("enter")
            await shoot()
            await pilot.press("escape")
            await pilot.press("D")
            await asyncio.sleep(FASTER_S)
            await shoot()
            await _until(lambda: session.watch.servers)
            await capture()
            await pilot.press("B")
            await asyncio.sleep(3.0)
            await shoot()
        session.close()
    return shown


def joined(pictures: list[str]) -> str:
    """One SVG that shows the pictures in turn."""
    view = re.search(r'viewBox="([^"]+)"', pictures[0])
    assert view is not None
    total, shown_s = sum(SECONDS), 0.0
    rules, parts = [], []
    for i, (picture, seconds) in enumerate(zip(pictures, SECONDS, strict=True)):
        begin, end = 100 * shown_s / total, 100 * (shown_s + seconds) / total
        shown_s += seconds
        hidden = f"0%,{begin - 0.01:.2f}%{{opacity:0}}" if i else ""
        edges = f"{hidden}{begin:.2f}%,{end:.2f}%{{opacity:1}}"
        tail = "" if i == len(pictures) - 1 else f"{end + 0.01:.2f}%,100%{{opacity:0}}"
        rules.append(f"@keyframes f{i}{{{edges}{tail}}}.f{i}{{opacity:{int(i == 1)};animation:f{i} {total}s infinite}}")
        body = re.sub(r"<\?xml.*?\?>|<!--.*?-->", "", picture, flags=re.S).strip()
        parts.append(f'<g class="f{i}">{body}</g>')
    still = "@media (prefers-reduced-motion:reduce){g{animation:none !important}}"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view[1]}"><style>{"".join(rules)}{still}</style>'
            f'{"".join(parts)}</svg>\n')


async def main() -> None:
    OwnCpu.ratio = lambda *_: None  # type: ignore[method-assign]
    pictures = await frames()
    (HERE / "demo.svg").write_text(joined(pictures))
    print(f"demo.svg: {len(pictures)} frames, {(HERE / 'demo.svg').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    asyncio.run(main())
