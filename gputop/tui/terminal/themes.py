"""The themes: gputop's own, made from the palette's schemes, beside those of Textual.

With one of Textual's themes the style sheet has the colors of that theme. Everything else is drawn with the colors of
gputop's dark or light scheme, whichever fits the theme.
"""

from __future__ import annotations

from textual.theme import Theme

from gputop.render.palette import SCHEMES


def theme_of(scheme: str) -> Theme:
    """One of gputop's own themes."""
    names = SCHEMES[scheme].names
    return Theme(
        name=f"gputop-{scheme}", dark=scheme != "light", primary=names["accent"], secondary=names["h2d"],
        accent=names["accent"], warning=names["warn"], error=names["bad"], success=names["compute"],
        foreground=names["text"], background=names["ground"], surface=names["surface"], panel=names["panel"],
        variables={
            "border": names["accent"], "border-blurred": names["border"], "footer-background": names["panel"],
            "footer-key-foreground": names["accent"], "footer-description-foreground": names["text"],
            "scrollbar": names["border"], "scrollbar-hover": names["dim"], "scrollbar-active": names["accent"],
            "scrollbar-background": names["ground"], "scrollbar-corner-color": names["ground"],
            "scrollbar-background-hover": names["ground"], "scrollbar-background-active": names["ground"],
            "block-cursor-blurred-background": f"{names['accent']} 45%", "block-cursor-background": names["accent"],
            "block-cursor-foreground": names["ground"],
            **variables(scheme),
        })


def variables(scheme: str) -> dict[str, str]:
    """Colors that Textual's themes do not have."""
    names = SCHEMES[scheme].names
    return {"quiet-border": names["border"], "quiet-text": names["dim"]}


def scheme_of(theme: Theme) -> str:
    """Scheme of the palette that goes with a theme."""
    scheme = theme.name.removeprefix("gputop-")
    return scheme if scheme in SCHEMES else "dark" if theme.dark else "light"
