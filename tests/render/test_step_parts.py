"""The table of a step's parts: one entry for each part that an analysis knows, distinguishable however it is drawn."""

from __future__ import annotations

from gputop.analysis.results import Breakdown
from gputop.render.palette import PART_STYLE, SCHEMES
from gputop.render.step_parts import PART_BY_ID, PART_IDS, PARTS, WORK_FIRST


def test_the_table_holds_the_parts_of_a_breakdown_in_their_order() -> None:
    assert list(Breakdown(**dict.fromkeys(PART_IDS, 1.0)).known) == list(PART_IDS)
    assert {part.id for part in WORK_FIRST} == set(PART_IDS) and len(WORK_FIRST) == len(PARTS)


def test_no_two_parts_share_a_name_a_letter_or_a_color() -> None:
    for field in ("id", "label", "name", "meaning", "letter", "dark", "light", "contrast", "ansi"):
        assert len({getattr(part, field) for part in PARTS}) == len(PARTS), field
    assert all(len(part.letter) == 1 and part.letter.isascii() for part in PARTS)


def test_every_scheme_and_every_style_takes_its_color_from_the_table() -> None:
    assert set(SCHEMES) == {"dark", "light", "contrast"}
    for scheme in SCHEMES:
        assert {id_: SCHEMES[scheme].names[id_] for id_ in PART_IDS} == {
            id_: getattr(part, scheme) for id_, part in PART_BY_ID.items()}
    assert {id_: style.color.name for id_, style in PART_STYLE.items() if style.color} == {
        part.id: part.dark for part in PARTS}
