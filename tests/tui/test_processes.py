from __future__ import annotations

from gputop.samples import GpuProcess, ProcessSample, Reading
from gputop.tui.processes import arrange, memory_bytes, sm_ratio


def _process(pid: int, command: str, memory: float | None, cpu: float | None, sm: float | None = 0.5) -> ProcessSample:
    def value(v: float | None, unit: str) -> Reading:
        return Reading.missing(unit, "not permitted") if v is None else Reading(v, unit)

    on_gpu = GpuProcess(pid, "C", value(memory, "bytes"), value(sm, "ratio"))
    return ProcessSample(pid, "ana", command, value(cpu, "cores"), value(1.0, "bytes"), 1, {0: on_gpu, 1: on_gpu})


A, B, C = _process(1, "python a.py", 10, 3.0), _process(2, "python b.py", 30, None), _process(3, "Xorg", None, 0.1)


def test_sorting_puts_the_largest_first_and_the_unknown_last() -> None:
    assert [p.pid for p in arrange([A, B, C], "gpu memory", "")] == [2, 1, 3]
    assert [p.pid for p in arrange([A, B, C], "cpu", "")] == [1, 3, 2]
    assert [p.pid for p in arrange([C, B, A], "pid", "")] == [1, 2, 3]


def test_filter_matches_pid_user_and_command() -> None:
    assert [p.pid for p in arrange([A, B, C], "pid", "PYTHON")] == [1, 2]
    assert [p.pid for p in arrange([A, B, C], "pid", "3")] == [3]
    assert [p.pid for p in arrange([A, B, C], "pid", "ana")] == [1, 2, 3]
    assert arrange([A, B, C], "pid", "nobody") == []


def test_sums_over_gpus_know_what_is_unknown() -> None:
    assert memory_bytes(A) == 20 and memory_bytes(C) is None
    assert sm_ratio(A) == 0.5 and sm_ratio(_process(4, "x", 1, 1, None)) is None
