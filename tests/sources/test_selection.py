"""--gpus and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest

from gputop.core.errors import EXIT_NO_DATA, EXIT_USAGE, GputopError
from gputop.core.samples import GpuInfo
from gputop.sources.selection import placeholder_uuid, select_gpus

NODE = [
    GpuInfo(0, "GPU-aa00", "H100"),
    GpuInfo(1, "GPU-ab11", "H100", mig_mode=True),
    GpuInfo(1, "MIG-7710", "H100 MIG 1g.10gb", mig=0),
    GpuInfo(1, "MIG-7811", "H100 MIG 1g.10gb", mig=3),
    GpuInfo(2, "GPU-bb22", "H100"),
]
SILENT = [*NODE, GpuInfo(3, placeholder_uuid(3), "GPU 3")]
MIXED = [GpuInfo(0, "GPU-aa00", "H100"), GpuInfo(1, "GPU-bb11", "T400")]


def labels(*items: str, present: list[GpuInfo] = NODE, **environ: str) -> list[str]:
    return [info.label for info in select_gpus(items, present, environ)]


def visible(value: str, present: list[GpuInfo] = NODE, **environ: str) -> list[str]:
    return labels("visible", present=present, CUDA_VISIBLE_DEVICES=value, **environ)


@pytest.mark.parametrize(("items", "expected"), [
    ((), ["0", "1", "1:0", "1:3", "2"]),
    (("2",), ["2"]),
    (("1",), ["1", "1:0", "1:3"]),
    (("1-2",), ["1", "1:0", "1:3", "2"]),
    (("2,0",), ["0", "2"]),
    (("1:3",), ["1:3"]),
    (("MIG-77", "GPU-BB"), ["1:0", "2"]),
    (("GPU-ab",), ["1", "1:0", "1:3"]),
    (("GPU-a",), ["0", "1", "1:0", "1:3"]),
    (("1:0", "1"), ["1", "1:0", "1:3"]),
])
def test_what_items_name(items: tuple[str, ...], expected: list[str]) -> None:
    assert labels(*items) == expected


@pytest.mark.parametrize("item", ["3", "1-3", "2-1", "GPU-ff", "MIG-99", "0:0", "1:1", "Visible", "-1", "index"])
def test_an_item_that_names_nothing_is_wrong_usage(item: str) -> None:
    with pytest.raises(GputopError) as caught:
        labels("0", item)
    assert caught.value.exit_code == EXIT_USAGE
    assert f"--gpus {item}" in caught.value.message and "1:3 (MIG-7811)" in caught.value.fix


def test_a_gpu_that_does_not_respond_may_be_the_one_with_that_uuid() -> None:
    assert labels("GPU-bb", present=SILENT) == ["2"]
    assert labels("3", present=SILENT) == ["3"]
    for item, message in (("GPU-cc", "may be GPU 3, which does not respond"), ("7", "--gpus 7: there is no such GPU"),
                          ("index", "--gpus index")):
        with pytest.raises(GputopError, match=message):
            labels(item, present=SILENT)
    with pytest.raises(GputopError, match=r"CUDA_VISIBLE_DEVICES=GPU-cc matches none .* GPU 3"):
        visible("GPU-cc", present=SILENT)


@pytest.mark.parametrize(("value", "expected"), [
    ("2,0", ["0", "2"]),
    (" 0 , 2 ", ["0", "2"]),
    ("0,-1,2", ["0"]),  # CUDA stops at the first entry that is no GPU
    ("0,9,2", ["0"]),
    ("0,,2", ["0"]),
    ("GPU-bb", ["2"]),
    ("2,GPU-a", ["2"]),  # the beginning of two UUIDs names neither
    ("GPU-ab11", ["1", "1:0", "1:3"]),
    ("MIG-7811", ["1:3"]),
    ("1", ["1", "1:0", "1:3"]),
])
def test_visible_reads_the_variable_as_cuda_does(value: str, expected: list[str]) -> None:
    assert visible(value) == expected


def test_without_the_variable_all_are_visible() -> None:
    assert labels("visible") == labels()
    assert labels("visible,2", CUDA_VISIBLE_DEVICES="0") == ["0", "2"]


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "9", "GPU-a"])
def test_a_variable_that_hides_all_gpus_leaves_nothing_to_show(value: str) -> None:
    with pytest.raises(GputopError, match="hides all GPUs of this node") as caught:
        visible(value)
    assert caught.value.exit_code == EXIT_NO_DATA


def test_numbers_are_ambiguous_among_different_models_only() -> None:
    with pytest.raises(GputopError, match="the fastest GPU first") as caught:
        visible("0", present=MIXED)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in caught.value.fix
    assert visible("0", present=MIXED, CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["0"]
    assert visible("GPU-aa", present=MIXED, CUDA_DEVICE_ORDER="FASTEST_FIRST") == ["0"]
    assert visible("1,0", present=MIXED) == ["0", "1"]
    assert visible("0", present=SILENT) == ["0"]
