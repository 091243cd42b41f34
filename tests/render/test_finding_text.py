from __future__ import annotations

from dataclasses import replace

from gputop.core.findings import Gain
from gputop.render.finding_text import evidence_label, gain_texts
from tests.tui.found import HEAVY


def test_a_gain_is_what_is_saved_of_the_step_time_or_per_training_sample() -> None:
    assert gain_texts(HEAVY, 0.344) == ("saves up to 38 % (344 → 213 ms)", "up to 38 %: 344 → 213 ms",
                                        "saves up to 38 %")
    assert gain_texts(HEAVY, 1.2)[1] == "up to 38 %: 1.20 s → 744 ms"
    assert gain_texts(HEAVY) == ("saves up to 38 % of the step", "saves up to 38 %")
    epoch = replace(HEAVY, gain=Gain(0.2, "a larger batch", "sample"))
    assert gain_texts(epoch, 0.344)[0] == "saves up to 20 % per training sample"
    replayed = replace(HEAVY, gain=Gain(0.38, "", by="replay"))
    assert gain_texts(replayed, 0.344) == ("saves 38 % (344 → 213 ms)", "38 %: 344 → 213 ms", "saves 38 %")
    for none in (None, 0.004):
        assert gain_texts(replace(HEAVY, gain=Gain(none, ""))) == ()


def test_evidence_is_told_in_words() -> None:
    assert evidence_label("launch_wait_s") == "launch wait" and evidence_label("share_ratio") == "share of the time"
    assert evidence_label("first_gpu_sm_active_ratio") == "first GPU SM active"
    assert evidence_label("h2d_bytes_per_step") == "to the GPU bytes per step"
    assert evidence_label("pcie_rx_bytes_per_s") == "PCIe received"
