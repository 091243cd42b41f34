"""Every key of every screen, pressed, and what it does. The keys are those of the classes: a new one needs a line in
:mod:`tests.tui.key_effects`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode
from textual.screen import ModalScreen

import gputop.tui
from gputop.tui.app import GputopApp
from gputop.tui.keys import FOOTERS, name
from gputop.tui.monitor.findings_panel import ActionsPanel
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.run_app import RunApp
from gputop.tui.widgets.cached_lines import KeyLine
from gputop.tui.widgets.dialog_frame import DialogFrame
from tests.tui.found import piloted, text_of
from tests.tui.key_effects import REPLAY, STAGES, AskedSession, Stage
from tests.tui.stages import monitor


def owners() -> dict[str, type]:
    """The classes of gputop.tui with keys of their own."""
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(gputop.tui.__path__, "gputop.tui."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, DOMNode) and value.__module__ == module.name \
                    and vars(value).get("BINDINGS"):
                found[value.__name__] = value
    return found


def keys_of(owner: type) -> dict[str, str]:
    """Its keys, with what they do."""
    return {key: binding.action for binding in vars(owner)["BINDINGS"] if isinstance(binding, Binding)
            for key in binding.key.split(",")}


@pytest.mark.parametrize("owner", owners())
def test_every_key_has_its_effect_here(owner: str) -> None:
    kind = owners()[owner]
    assert kind in STAGES, f"{owner} has keys: say in STAGES what they do"
    effects = set(STAGES[kind].effects) | (set(REPLAY.effects) if kind is GputopApp else set())
    actions = set(keys_of(kind).values())
    assert actions <= effects, f"keys of {owner} that nobody presses: {actions - effects}"
    assert effects <= actions, f"{owner} has no such keys any more: {effects - actions}"


@pytest.mark.parametrize("owner", owners())
def test_no_key_has_two_actions_and_each_is_written_as_it_stands_on_the_keyboard(owner: str) -> None:
    keys = [key for binding in vars(owners()[owner])["BINDINGS"] for key in binding.key.split(",")]
    assert len(keys) == len(set(keys)) and not [shown for shown in map(name, keys) if "_" in shown]


@pytest.mark.parametrize("mode", FOOTERS)
def test_the_line_of_keys_names_only_keys_that_there_are(mode: str) -> None:
    known = {"escape", "tab"}.union(*(keys_of(kind) for kind in (GputopApp, RunApp, ActionsPanel, ProcessPanel)))
    assert {key for keys, _ in FOOTERS[mode] for key in keys.split(",")} <= known


async def test_the_line_of_keys_follows_what_one_does_and_a_click_presses_the_key() -> None:
    session = AskedSession()
    async with piloted(session, (80, 24)) as (app, pilot):
        def shown() -> str:
            return text_of(app.query_one(KeyLine))

        assert shown().startswith(" c capture  a attach") and shown().endswith("? help  q quit  ")
        await pilot.click(KeyLine, offset=(3, 0))
        assert session.asked == [("capture", False)]
        session.capture()
        app._refresh_all()
        assert " t timeline  T tables " in shown() and len(shown()) <= 81
        await pilot.press("v")
        assert shown().startswith(" ← → move")
        await pilot.press("escape")
        assert "timeline" in shown(), "escape steps back"
        await pilot.press("left")
        assert shown().startswith(" ← → scroll")
        app.query_one(ProcessPanel).focus()
        await pilot.pause()
        assert "K signal" in shown()
    wide = KeyLine()
    wide.show_keys(FOOTERS["captured"], 20)
    assert text_of(wide) == " ? help  q quit  "


# -- pressing them -------------------------------------------------------------------------------


@pytest.mark.parametrize(("owner", "stage"), [*STAGES.items(), (GputopApp, REPLAY)],
                         ids=[*(owner.__name__ for owner in STAGES), "replay"])
async def test_every_key_does_what_it_says(owner: type, stage: Stage, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed: list[str] = []
    async with monitor(stage, tmp_path) as (app, pilot):
        opened = 0  # how many screens there are once the stage is open
        for action, effect in stage.effects.items():
            for key in (key for key, does in keys_of(owner).items() if does == action):
                stays = stage.stays and opened and len(app.screen_stack) >= opened
                while len(app.screen_stack) > (opened if stays else 1):
                    app.pop_screen()
                app.ends = False
                app.clear_notifications()
                app.copy_to_clipboard("")
                if isinstance(app.session, AskedSession):
                    app.session.asked.clear()
                if not stays:
                    app.query_one(stage.focus or ActionsPanel).focus()
                    await pilot.press(*stage.keys)
                    await app.workers.wait_for_complete()
                    await pilot.pause()
                    opened = len(app.screen_stack)
                    if issubclass(owner, ModalScreen):
                        assert_in_the_middle(app)
                await pilot.press(*effect.first)
                await pilot.pause()
                before = effect.seen(app)
                await pilot.press(key)
                await app.workers.wait_for_complete()
                await pilot.pause()
                after = effect.seen(app)
                if not effect.differs(before, after):
                    failed.append(f"{key}, which is to {action}: it was {before!r} and is {after!r}")
        assert not failed, "\n".join([owner.__name__, *failed])


def assert_in_the_middle(app: App[Any]) -> None:
    """The boxes that are open stand in the middle of the screen."""
    for box in app.screen.query(DialogFrame):
        left, top = box.region.x, box.region.y
        right, bottom = app.size.width - box.region.right, app.size.height - box.region.bottom
        assert abs(left - right) <= 1 and abs(top - bottom) <= 1, (left, right, top, bottom)


@pytest.mark.parametrize("owner", owners())
def test_keys_are_written_as_they_stand_on_the_keyboard(owner: str) -> None:
    assert not [shown for shown in map(name, keys_of(owners()[owner])) if "_" in shown]
