"""``gputop serve`` in a real browser: Debian's headless Chromium, spoken to by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
# As root, in a container, and without what a browser does for itself on the network.
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
         "--window-size=1200,800", "--remote-debugging-port=0")
# textual-serve's page keeps its terminal to itself: the object that gets this field holds it.
KEEP_TERMINAL = """Object.defineProperty(Object.prototype, "webglAddon", {configurable: true, set(value) {
  window.page = this;
  Object.defineProperty(this, "webglAddon", {value, writable: true});
}})"""
SHOWN = """(() => { const screen = window.page && page.terminal.buffer.active;
  return screen ? [...Array(page.terminal.rows).keys()].map(i => screen.getLine(i).translateToString()).join("\\n") : ""
})()"""


class Page:
    """A page of the browser. ``loaded`` are the addresses that answered it."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number, self._session = socket, 0, ""
        self.loaded: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": self._number, "method": method, "params": params, **session})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("method") == "Network.responseReceived":
                self.loaded.append(answer["params"]["response"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    async def open(self, address: str) -> None:
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        await self.call("Network.enable")
        await self.call("Page.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=KEEP_TERMINAL)
        await self.call("Page.navigate", url=address)

    async def shows(self, text: str) -> str:
        """The screen of the terminal once it shows ``text``."""
        while True:
            screen = str((await self.call("Runtime.evaluate", expression=SHOWN))["result"].get("value", ""))
            if text in screen:
                return screen

    async def picture(self) -> bytes:
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])

    async def press(self, key: str) -> None:
        await self.call("Runtime.evaluate", expression="page.terminal.focus()")
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    import aiohttp

    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(CHROMIUM, *FLAGS, f"--user-data-dir={folder}", stderr=PIPE)
    try:
        address = await line_with(process, r"DevTools listening on (ws://\S+)")
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
            yield Page(socket)
    finally:
        process.kill()
        await process.communicate()


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gputop", "serve", "--demo", "healthy", "--listen", "0", stderr=PIPE,
        env={**os.environ, "TERM": "dumb"})
    try:
        yield await line_with(process, r"(http://127\.0\.0\.1:\d+/[\w-]+/)")
    finally:
        process.terminate()
        await process.communicate()


async def line_with(process: asyncio.subprocess.Process, pattern: str) -> str:
    assert process.stderr is not None
    seen = ""
    while line := (await process.stderr.readline()).decode():
        seen += line
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"it ended: {seen}")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: chromium-headless-shell)")
async def test_a_browser_shows_the_monitor_and_its_keys_answer(tmp_path: Path) -> None:
    pytest.importorskip("textual_serve", reason="textual-serve is not installed")
    async with served() as address, browser(tmp_path) as page:
        await page.open(address)
        for words in ("What to do", "demo-node", "SIMULATED"):  # a picture may come in several pieces
            await page.shows(words)
        before = await page.picture()
        await page.press("?")
        await page.shows("esc: close")
        assert await page.picture() != before
        await page.press("q")
        while "esc: close" in await page.shows(""):
            pass
        here = address.rsplit("/", 2)[0] + "/"
        assert page.loaded and all(url.startswith((here, "data:", "blob:")) for url in page.loaded), page.loaded
