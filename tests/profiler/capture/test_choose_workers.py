"""Which few of many workers are worth a capture."""

from __future__ import annotations

from gputop.profiler.capture.choose_workers import choose_workers

MANY = [f"n{number:02}:6009" for number in range(64)]


def test_both_ends_and_the_middle_by_a_live_figure() -> None:
    figures = {address: 0.8 + number / 1000 for number, address in enumerate(MANY)}
    figures |= {"n40:6009": 0.3, "n07:6009": 0.95}
    choice = choose_workers(MANY, figures, "SM active", lambda value: f"{value:.0%}")
    assert choice.chosen[0] == "n40:6009" and choice.chosen[2] == "n07:6009" and choice.of == 64
    assert choice.reasons[0] == "lowest, 30%" and choice.by == "SM active"
    below = sum(value < figures[choice.chosen[1]] for value in figures.values())
    assert below == 31
    assert choice.text().startswith("3 of 64 workers, by SM active: n40:6009 (lowest, 30%)")


def test_without_figures_the_order_decides_and_it_is_said() -> None:
    for figures in ({}, dict.fromkeys(MANY[:2], 0.5)):
        choice = choose_workers(MANY, figures)
        assert choice.chosen == (MANY[0], MANY[31], MANY[63]) and "no live samples" in choice.by
    assert "61 have no value" in choose_workers(MANY, dict.fromkeys(MANY[:3], 0.5), "power").by
