"""Which processes are shown although they hold no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.core.samples import NodeSample
from gputop.profiler.discovery import TrainingProcesses
from gputop.session.capture.server_watch import ServerWatch
from gputop.session.options import Options
from gputop.sources.factory import GpusOrHost
from gputop.sources.host.source import PsutilHost
from gputop.sources.simulated import SimulatedSource
from tests.advice.live.scene import Job, Scene
from tests.records import replace


class Gpus(SimulatedSource):
    """GPUs of a node whose host is this one."""

    simulated = False
    host = PsutilHost()


@pytest.mark.parametrize(("sample", "watched"), [
    (Scene(jobs=[], gpus=2).sample(0.0), (7,)), (replace(Scene(jobs=[]).sample(0.0), gpus=(), gpus_present=None), (7,)),
    (Scene(jobs=[Job(gpus=[1])], gpus=2).sample(0.0), ()), (Scene(jobs=[], gpus=2, watched=[0]).sample(0.0), ()),
    (Scene(jobs=[], gpus=2, change=lambda gpu, _: replace(gpu, processes_reason="no permission")).sample(0.0), ()),
], ids=["no process on the gpus", "no gpu", "one in use", "one not watched", "processes not read"])
def test_training_processes_are_shown_where_none_holds_a_gpu(sample: NodeSample, watched: tuple[int, ...],
                                                             monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(TrainingProcesses, "find", lambda self: (7,))
    monkeypatch.setattr("gputop.session.capture.server_watch.find_servers", lambda *_: ((), (), None))
    source = GpusOrHost(Gpus(), lambda: True)
    source.open()
    watch = ServerWatch(source, Options(logdir=tmp_path), lambda: None)
    watch.sample = sample
    watch.update()
    assert Gpus.host.watched_pids == watched
