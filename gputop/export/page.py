"""The skeleton of gputop's pages: no request leaves one, and it opens from a file.

A policy in the head forbids the browser to load anything and to run any script but the page's own, which copies
snippets and turns the icicle's boxes; a page without it runs none.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from gputop.text.markup import esc

SCRIPT = """\
for (const box of document.querySelectorAll(".code")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const pre = box.querySelector("pre");
    try {
      await navigator.clipboard.writeText(pre.textContent);
    } catch {
      getSelection().selectAllChildren(pre);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  box.append(button);
}
for (const plate of document.querySelectorAll(".icicle")) {
  const boxes = [...plate.children].map((box) => (
    {box, x: parseFloat(box.style.left), w: parseFloat(box.style.width), y: parseFloat(box.style.top)}));
  let alone = null;
  plate.addEventListener("click", (event) => {
    const hit = boxes.find((b) => b.box === event.target);
    if (!hit) return;
    alone = alone === hit ? null : hit;
    const [x, w, y] = alone ? [hit.x, hit.w, hit.y] : [0, 100, -1];
    for (const b of boxes) {
      const inside = !alone || b === hit || (b.y > y && b.x > x - 0.002 && b.x + b.w < x + w + 0.002);
      const above = alone && b.y < y && b.x < x + 0.002 && b.x + b.w > x + w - 0.002;
      b.box.hidden = !inside && !above;
      b.box.style.left = above ? "0%" : 100 * (b.x - x) / w + "%";
      b.box.style.width = above ? "100%" : 100 * b.w / w + "%";
    }
  });
}
"""
BANNER = ('<div class="banner" role="note">SIMULATED <span>— no hardware was measured: all values on this page '
           "come from gputop's simulated node.</span></div>")


def page(title: str, parts: Iterable[str], end: Iterable[str], *, script: str = SCRIPT, style: str = "") -> str:
    """A page of gputop: sections, and what follows them. ``style`` is added to that of all pages."""
    css = resources.files("gputop.export").joinpath("report.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"script-src 'sha256-{digest}'; " if script else ""
    return "\n".join((
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'; '
        f'{policy}base-uri \'none\'; form-action \'none\'">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{esc(title)}</title>", f"<style>\n{css}{style}</style>", "</head>", "<body>",
        *(part for part in (*parts, *end) if part), *([f"<script>{script}</script>"] if script else ()), "</body>",
        "</html>", ""))


def header(brand: str, heading: str, facts: Iterable[str], when: str) -> str:
    """The head of a page: what it is, of what, ``facts`` as HTML, and of which time."""
    spans = "".join(f"<span>{fact}</span>" for fact in facts)
    return (f'<header class="top"><div><div class="brand">{brand}</div><h1>{esc(heading)}</h1>'
            f'<div class="facts">{spans}</div></div><div class="when">{esc(when)}</div></header>')


def embedded(document: Mapping[str, Any]) -> str:
    """The document as JSON in which no text can end the script element around it."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
