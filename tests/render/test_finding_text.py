from __future__ import annotations

from dataclasses import replace

from gputop.core.findings import Gain
from gputop.render.finding_text import gain_texts
from tests.tui.found import HEAVY


def test_a_gain_is_what_is_saved_of_the_step_time_or_per_training_sample() -> None:
    assert gain_texts(HEAVY, 0.344) == ("saves up to 38 % (344 → 213 ms)", "up to 38 %: 344 → 213 ms",
                                        "saves up to 38 %")
    assert gain_texts(HEAVY, 1.2)[1] == "up to 38 %: 1.20 s → 744 ms"
    assert gain_texts(HEAVY) == ("saves up to 38 % of the step", "saves up to 38 %")
    epoch = replace(HEAVY, gain=Gain(0.2, "a larger batch", "sample"))
    assert gain_texts(epoch, 0.344)[0] == "saves up to 20 % per training sample"
    for none in (None, 0.004):
        assert gain_texts(replace(HEAVY, gain=Gain(none, ""))) == ()
