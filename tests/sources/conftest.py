"""The fake NVML, compiled once, in this process for one test at a time; nodes with a DCGM host engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dcgm_double.scene import Scene
from tests.nvml_fake import FakeNvml, build


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake(nvml_library: Path) -> Iterator[FakeNvml]:
    with FakeNvml(nvml_library) as fake:
        yield fake


class Clock:
    """A clock that tests turn: monotonic and Unix time in one, and the fake driver's with it."""

    def __init__(self, fake: FakeNvml | None = None, start_s: float = 1000.0) -> None:
        self.now_s = start_s
        self._fake = fake
        self.advance(0.0)

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        if self._fake is not None:
            self._fake.set_time(self.now_s)


@pytest.fixture
def clock(fake: FakeNvml) -> Clock:
    return Clock(fake)


@pytest.fixture
def make_scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """Makes nodes with a host engine and its bindings, by DCGM's major versions."""
    scenes: list[Scene] = []

    def new(*majors: int, **engine: object) -> Scene:
        scenes.append(Scene(tmp_path, *majors, **engine))  # type: ignore[arg-type]
        return scenes[-1]

    yield new
    for scene in scenes:
        scene.close()
