"""Pages of dcgm-exporter whose GPUs do what a test says, now and in the hours before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

Level = Callable[[int, float], float | None]  # of a GPU, so many seconds ago; None: no sample


class Exporter(Struct, frozen=True):
    """dcgm-exporter on a node of eight GPUs. ``new``: its names of 4.9; ``level``: what its GPUs do."""

    node: str
    job: str = "7"
    new: bool = False
    level: Level = lambda gpu, ago_s: 0.9
    labels: str = ""
    watts: float = 500.0

    def own(self, gpu: int) -> str:
        host = "hostname" if self.new else "Hostname"
        job = f',hpc_job="{self.job}"' * bool(self.job)
        return f'gpu="{gpu}",UUID="GPU-{self.node}-{gpu}",{host}="{self.node}"{job}{self.labels}'

    @property
    def names(self) -> tuple[str, str]:
        return (("DCGM_FI_PROF_SM_UTIL_RATIO", "DCGM_FI_DEV_BOARD_POWER_WATTS") if self.new else
                ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_POWER_USAGE"))

    def page(self) -> bytes:
        activity, power = self.names
        lines = [f"{power}{{{self.own(gpu)}}} {self.watts}" for gpu in range(8)]
        lines += [f"{activity}{{{self.own(gpu)}}} {level}" for gpu in range(8)
                  if (level := self.level(gpu, 0.0)) is not None]
        return "".join(f"{line}\n" for line in lines).encode()

    def past(self, instance: str, seconds: Sequence[float], now_s: float) -> list[str]:
        return [f'{self.names[0]}{{{self.own(gpu)},instance="{instance}",job="dcgm"}} {level} {now_s - ago_s:.3f}\n'
                for gpu in range(8) for ago_s in seconds if (level := self.level(gpu, ago_s)) is not None]


def openmetrics(lines: Sequence[str]) -> Iterator[str]:
    for name in sorted({line.partition("{")[0] for line in lines}):
        yield f"# TYPE {name} gauge\n"
        yield from (line for line in lines if line.startswith(name + "{"))
    yield "# EOF\n"


def seconds(hours: float, step_s: float = 30.0) -> list[float]:
    return [step_s * i for i in range(round(hours * 3600 / step_s), 0, -1)]
