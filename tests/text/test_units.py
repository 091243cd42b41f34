from __future__ import annotations

import numpy as np
import pytest

from gputop.core.samples import GpuProcess, ProcessSample, Reading
from gputop.text import units as fmt


@pytest.mark.parametrize(("value", "text"), [
    (0, "0B"), (999, "999B"), (1024, "1.0K"), (820 * 2**20, "820M"), (71.2 * 2**30, "71.2G"), (2**40, "1.0T")])
def test_bytes(value: float, text: str) -> None:
    assert fmt.bytes_(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0, "0 B/s"), (340e3, "340 kB/s"), (1.2e9, "1.2 GB/s"), (999.9e6, "1.0 GB/s")])
def test_rate(value: float, text: str) -> None:
    assert fmt.rate(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0, "0 s"), (2e-6, "2.0 µs"), (76e-6, "76.0 µs"), (0.0021, "2.1 ms"), (0.0954, "95.4 ms"), (0.412, "412 ms"),
    (1.239, "1.24 s"), (39.04, "39.0 s"), (155.7, "2.6 min"), (180, "3 min"), (5400, "90 min"), (7200, "2.0 h")])
def test_seconds(value: float, text: str) -> None:
    assert fmt.seconds(value) == text


def test_a_ratio_is_rounded_alike_in_64_bits_and_in_the_32_of_the_history() -> None:
    assert fmt.percent(0.384) == "38%"
    for half in range(201):
        value = half / 200
        assert fmt.percent(value) == fmt.percent(float(np.float32(value))), value


def test_unknown_differs_from_zero_and_a_reading_has_a_value_or_a_reason() -> None:
    assert fmt.reading(Reading.missing("W", "no permission")) == "N/A" and fmt.reading(Reading(0.0, "W")) == "0W"
    with pytest.raises(ValueError, match="a value or a reason"):  # a reading has a value or a reason
        Reading(None, "W")
    with pytest.raises(ValueError, match="a value or a reason"):
        Reading(1.0, "W", reason="both")


@pytest.mark.parametrize(("text", "width", "shown"), [
    ("abc", 5, "abc  "), ("abcdef", 4, "abc…"), ("日本語", 5, "日本…"), ("日本語", 6, "日本語"), ("", 2, "  "),
    ("abc", 0, "")])
def test_fit_counts_cells(text: str, width: int, shown: str) -> None:
    assert fmt.fit(text, width) == shown


def test_fit_in_the_middle_leaves_both_ends_and_to_the_right_one() -> None:
    assert fmt.fit_middle("tf_data_iterator_resource", 15) == "tf_data…esource"
    assert fmt.fit_middle("tf_data_iterator_get_next", 15) == "tf_data…et_next"
    assert [fmt.fit_middle(*of) for of in (("python", 8), ("日本語日本語", 5), ("python", 2))] == [
        "python  ", "日本…", "p…"]
    assert fmt.fit("7%", 5, right=True) == "   7%"  # fit to the right


def test_printable_leaves_no_way_to_drive_the_terminal() -> None:
    assert fmt.printable("a\x1b[31mb\r\nc\u202ed\x9b2J") == "a�[31mb c�d�2J"
    assert fmt.printable("a\ud800b?") == "a\ufffdb?", "half of a surrogate pair"


@pytest.mark.parametrize(("name", "value", "text"), [
    ("wait_s", 0.181, "181 ms"), ("share_ratio", 0.533, "53%"), ("kernels_per_s", 4862.3, "4,862/s"),
    ("h2d_bytes_per_s", 27.7e9, "27.7 GB/s"), ("h2d_bytes_per_step", 25.5e9, "23.7 GiB"),
    ("peak_bytes", 7 << 30, "7.0 GiB"), ("power_w", 341.4, "341W"), ("factor", 8, "8×"), ("ratio", 2.24, "2.24×"),
    ("last_to_arrive_count", 5, "5")])
def test_evidence_is_shown_in_the_unit_its_name_ends_in(name: str, value: float, text: str) -> None:
    assert fmt.figure(name, value) == text


def test_ranges_are_short() -> None:
    assert fmt.ranges([]) == "" and fmt.ranges([3]) == "3" and fmt.ranges([7, 0, 1, 2, 5]) == "0-2,5,7"
    assert fmt.ranges([0, 1, 5], ", ") == "0-1, 5"


@pytest.mark.parametrize(("held", "text"), [
    ({}, ""), ({0: None, 1: None, 5: None}, "0-1,5"), ({0: 1}, "0:1"), ({2: None, 0: 3, 1: None}, "1-2,0:3")])
def test_devices_of_a_process(held: dict[int, int | None], text: str) -> None:
    none = Reading.missing("bytes", "not asked")
    gpus = {index: GpuProcess(7, "C", mig, none, none) for index, mig in held.items()}
    assert fmt.devices(ProcessSample(7, None, None, none, none, gpus=gpus)) == text
