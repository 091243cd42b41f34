"""Text broken into lines."""

from __future__ import annotations

from gputop.render.styled_text import wrap_sentences


def test_what_does_not_fit_is_left_out_by_whole_sentences() -> None:
    text = "Half of it waits. The rest works at 96% of the peak. Nothing else is known."
    assert wrap_sentences(text, 41, 3) == [
        "Half of it waits. The rest works at 96%", "of the peak. Nothing else is known."]
    assert wrap_sentences(text, 40, 1) == ["Half of it waits. …"]
    assert wrap_sentences("A first sentence that is long and has no end here. Then more.", 30, 1) == [
        "A first sentence that is …"]
