"""Text from outside made harmless in HTML and SVG."""

from __future__ import annotations

import html
import time

from gputop.text.units import printable


def esc(text: str | None) -> str:
    """``text`` as content or attribute of HTML and XML: shown literally, without control characters."""
    return html.escape(printable(text or ""), quote=True)


def lines(text: str) -> str:
    """``text`` without control characters, its lines and their indentation kept."""
    return "\n".join(" " * (len(line) - len(line.lstrip(" "))) + printable(line.lstrip(" "))
                     for line in text.expandtabs(4).split("\n"))


def esc_lines(text: str) -> str:
    """The same as content of HTML."""
    return html.escape(lines(text), quote=True)


def titled(text: str, title: str | None, kind: str = "") -> str:
    """A figure that says on hover where it comes from, or why there is none."""
    kind = f' class="{kind}"' if kind else ""
    return f'<span{kind} title="{esc(title)}">{esc(text)}</span>'


def moment(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time_s))
