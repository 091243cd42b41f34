"""A host engine, installed bindings and a client, on a clock that tests turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gputop.sources.dcgm.client import DcgmClient
from gputop.sources.dcgm.connection import parse_address
from tests.dcgm_double import DOUBLES, INTEGERS, PROFILING, Gpu, HostEngine, install

START_S = 1_700_000_000.0


class Scene:
    """Two GPUs by default. Monotonic and Unix time of gputop and the engine's clock advance together."""

    def __init__(self, root: Path, *majors: int, gpus: int = 2, **engine: Any) -> None:
        self.root = install(root, *(majors or (4,)))
        self.now_s = START_S
        self.engine = HostEngine([Gpu(i, f"GPU-{i}", bus=f"00000000:0{i}:00.0") for i in range(gpus)],
                                 clock=lambda: self.now_s, **engine)
        self.show({i: 0.5 if i in PROFILING & DOUBLES else 3 for i in DOUBLES | INTEGERS})
        self.client = self.new_client()

    def new_client(self, **options: Any) -> DcgmClient:
        return DcgmClient(parse_address(self.engine.address), root=self.root, env={}, clock=lambda: self.now_s,
                          wall_clock=lambda: self.now_s, **options)

    def show(self, figures: dict[int, float]) -> None:
        """What every GPU's fields are from the next update on."""
        self.engine.figures |= {(gpu, i): value for gpu in self.engine.gpus for i, value in figures.items()}

    def step(self, seconds: float = 1.0, times: int = 1) -> None:
        """Time passes, the engine reads what is watched, the client asks once, without its thread."""
        for _ in range(times):
            self.now_s += seconds
            if self.engine.alive:
                self.engine.update()
            self.client.step()

    def value(self, field: int, gpu: int = 0) -> float | str:
        """What the client's snapshot holds: the value, or the reason."""
        snapshot = self.client.snapshot()
        if snapshot.error is not None:
            return snapshot.error
        found = snapshot.values[f"GPU-{gpu}"][field]
        return found.reason if found.value is None else found.value

    def close(self) -> None:
        self.engine.close()
        self.client.close()
