"""What is attacked: for each door to the outside the seeds to mutate, and how one input is taken through gputop.

Each ``run`` goes the way a user's command goes, up to what would be shown. It may raise only GputopError.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gzip
import json
import math
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from gputop import cli
from gputop.advice.live.ranks import counts_text, place_text, title
from gputop.analysis.results import Analysis
from gputop.commands import settings
from gputop.core.samples import XidEvent
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.diagnosis.rules_in_process import use_rules
from gputop.export.snapshot import FORMATS, render
from gputop.profiler.xprof import messages, probe
from gputop.ranks import stack_groups
from gputop.ranks.model import RasAnswer, find_absence
from gputop.ranks.ras_answers import read_json, read_text
from gputop.ranks.stacks import ProcessStacks, read_dump
from gputop.replay.format import RecordingWriter
from gputop.replay.rule_trials import over_samples, over_trace
from gputop.replay.snapshot_document import from_document
from gputop.replay.snapshot_source import SnapshotPlayer, open_player
from gputop.rules.read_files import RulePath
from gputop.session.session import Session
from gputop.simulation.loop import SimulatedLoop
from gputop.simulation.scenarios import find_scenario
from gputop.simulation.xspace import build_xspace
from gputop.sources.dcgm.source import DcgmSource
from gputop.sources.nvml.source import NvmlSource
from gputop.text import console
from gputop.timeline.build import RowsWritten
from gputop.timeline.read_timeline import Timeline
from gputop.trace.readers.load import load
from tests.campaign import fuzz_cluster, fuzz_kineto, fuzz_process, fuzz_ranks
from tests.campaign.target import Target
from tests.dcgm_double import DOUBLES, INTEGERS
from tests.dcgm_double.scene import Scene
from tests.diagnosis.small_traces import few, tiny
from tests.fakes import START_S, node_sample
from tests.listening import listening
from tests.nvml_fake import FakeNvml
from tests.profiler.capturing import capture
from tests.profiler.fake_server import FakeProfiler, make_xspace, serve
from tests.ranks.ras_double import Job, as_json, as_text
from tests.records import replace
from tests.trace.readers.chrome.kineto_file import kineto
from tests.trace.readers.nsys_report import report

DATA = Path(__file__).parents[1] / "data"
_SAMPLES = 40  # of a recording that are looked at


# -- traces --------------------------------------------------------------------------------------


def _trace(name: str) -> Callable[[Path, bytes], None]:
    def run(folder: Path, data: bytes) -> None:
        path = folder / name
        path.write_bytes(data)
        if len(data) % 3:
            cli.main(["analyze", str(path), "--idle-gaps", "3", *(["--json"] if len(data) % 2 else [])])
            return
        facts = analyze_to_facts(load([path]))
        with tempfile.TemporaryFile() as file:
            timeline = Timeline.open(file, RowsWritten(facts.trace, facts.steps, file).finish(facts))
            begin, end = timeline.window_ns
            for row in range(min(8, len(timeline.rows))):
                timeline.coverage.picture([row], begin, end, 50)
                timeline.ranges(row, begin, end, 20)
    return run


def _recorded(*names: str) -> list[bytes]:
    return [gzip.decompress((DATA / name).read_bytes()) for name in names]


@functools.cache
def _simulated() -> bytes:
    loop, second = SimulatedLoop(find_scenario("input-bound")), 10**9
    return build_xspace(loop, 3 * second, 3 * second + second // 16, 0, "node")


def _xspaces(_: Path) -> list[bytes]:
    return [tiny(), make_xspace(5, ("an error",), ("a warning",), (1, 2)),
            *_recorded("jax_run/host.xplane.pb.gz", "jax_python.xplane.pb.gz"), _simulated()]


def _chrome(_: Path) -> list[bytes]:
    return [few(), json.dumps(kineto()).encode(), json.dumps(kineto(rank=1)).encode(),
            *_recorded("jax_run/host.trace.json.gz", "jax_run/perfetto_trace.json.gz",
                       "pytorch_stack.pt.trace.json.gz")]


def _nsys(folder: Path) -> list[bytes]:
    return [report(folder / "seed.sqlite").read_bytes(), report(folder / "less.sqlite", ("NVTX_EVENTS",)).read_bytes()]


# -- what gputop itself wrote, or somebody in its name ---------------------------------------------


def _analysis(folder: Path, data: bytes) -> None:
    saved, other = folder / "a.json", folder / "b.json"
    saved.write_bytes(data)
    other.write_bytes((DATA / "v0_1_0/analysis.json").read_bytes())
    both = [str(saved), str(other)]
    cli.main(["compare", *(both if len(data) % 2 else both[::-1]), *(["--json"] if len(data) % 3 else [])])


def _snapshot(folder: Path, data: bytes) -> None:
    path = folder / "snapshot.json"
    path.write_bytes(data)
    _replay(path, len(data))
    cli.main(["replay", str(path)])  # says that it needs a terminal
    other = folder / "b.json"
    other.write_bytes(_small_snapshot())
    cli.main(["compare", str(path), str(other)])


def _recording(folder: Path, data: bytes) -> None:
    path = folder / "node.gputop"
    path.write_bytes(data)
    _replay(path, len(data))
    cli.main(["replay", str(path)])


def _replay(path: Path, choice: int) -> None:
    """Every sample through a session, and the whole of it as one of the exports."""
    player, snapshot = open_player(path, 0.0, 1.0, console.say)
    try:
        session = Session(player, replayed_snapshot=snapshot)
        samples = player.recording
        for index in range(min(len(samples), _SAMPLES)):
            session.feed.on_sample(samples.sample(index))
        if session.feed.sample is not None:
            _written(session, choice)
    finally:
        player.recording.close()


def _written(session: Session, choice: int) -> None:
    text = render(session, FORMATS[choice % len(FORMATS)])
    console.write_document(text)
    if choice % len(FORMATS) == 0 and text.startswith("{"):
        SnapshotPlayer(from_document(json.loads(text)))


@functools.cache
def _small_snapshot() -> bytes:
    from tests.fakes import StillSession

    return render(StillSession(40, gpus=1), "json").encode()


def _snapshots(_: Path) -> list[bytes]:
    return [_small_snapshot()]


def _recordings(folder: Path) -> list[bytes]:
    path = Path(tempfile.mkdtemp(dir=folder)) / "seed.gputop"
    writer = RecordingWriter(path)
    for tick in range(6):
        sample = node_sample(tick, 2)
        if tick > 2:  # a fault
            sample = replace(sample, gpus=(replace(sample.gpus[0], xids=(XidEvent(START_S, 79),)), *sample.gpus[1:]))
        writer.append(sample)
    writer.close()
    return [path.read_bytes(), (DATA / "v0_1_0/demo.gputop").read_bytes()]


# -- settings --------------------------------------------------------------------------------------

_CONFIG = b"""# settings
interval = 0.5
attach = ["node1:6009", "node2"]
logdir = "/tmp/x"
theme = "gputop-light"
color = "256"
ascii = true
gpus = "0,2-3"
dcgm-watch = false
"""


def _rule_files(_: Path) -> list[bytes]:
    blocks = re.findall(r"```toml\n(.*?)```", (DATA.parents[1] / "docs/tasks/custom-rules.md").read_text(), re.S)
    return [block.encode() for block in blocks]


def _rules(folder: Path, data: bytes) -> None:
    """Read, judged by on a trace and on samples, and explained."""
    path = folder / "rules.toml"
    path.write_bytes(data)
    use_rules([RulePath(str(path), "named")])
    over_trace(_saved_analysis())
    over_samples(node_sample(tick, 2) for tick in range(8))
    cli.main(["rules", "check", str(path)])
    cli.main(["rules", "list"])


@functools.cache
def _saved_analysis() -> Analysis:
    return Analysis.from_json(json.loads((DATA / "v0_1_0/analysis.json").read_text()))


def _config(folder: Path, data: bytes) -> None:
    path = folder / "config" / "gputop" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    cli.main(["config"])
    settings.save_setting(path, "theme", "gputop-dark")
    settings.load(path)


# -- profiler servers -------------------------------------------------------------------------------


class _RawServer:
    """A gRPC server that answers every call of the profiler service with the same bytes or error."""

    def __init__(self) -> None:
        self.answer = b""
        self.fails: tuple[Any, str] | None = None
        server = grpc.server(futures.ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(self._call)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            messages.SERVICE, dict.fromkeys(("Profile", "Terminate", "Monitor"), handler)),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self._server = server

    def _call(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if not request.startswith(b"\x08"):  # the probe's, which cannot be parsed
            context.abort(grpc.StatusCode.INTERNAL, "cannot parse")
        if self.fails is not None:
            context.abort(*self.fails)
        return self.answer


@functools.cache
def _raw_server() -> _RawServer:
    return _RawServer()


def _answer(folder: Path, data: bytes) -> None:
    server = _raw_server()
    server.answer, server.fails = data, None
    if data[:1] == b"!":
        code = list(grpc.StatusCode)[1 + data[-1] % (len(grpc.StatusCode) - 1)]
        server.fails = code, data[1:4000].decode("latin-1")
    result = capture(server.address, seconds=0.001, logdir=folder / "logs")
    for message in (*result.errors, *result.warnings):
        console.say(message)


def _answers(_: Path) -> list[bytes]:
    xspace = make_xspace(4, ("went wrong",), ("beware",), (1_000, 2_000))
    return [messages.RawProfileResponse(xspace=xspace).SerializeToString(),
            messages.RawProfileResponse(empty_trace=True).SerializeToString(),
            messages.RawProfileResponse(xspace=tiny()).SerializeToString(),
            b"!another session is active", b"!\x1b[2Jx\n\r"]


def _greeting(folder: Path, data: bytes) -> None:
    """A socket that says these bytes to whoever connects, and then no more."""
    def serve_bytes(connection: socket.socket) -> None:
        connection.settimeout(0.2)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass

    with listening(serve_bytes, together=False) as address:
        probe.probe(address, 0.5)


@functools.cache
def _heard() -> tuple[bytes, ...]:
    """What a real gRPC server says on the wire while it is probed."""
    said: list[bytes] = []
    with serve(FakeProfiler()) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        host, _, port = server.address.rpartition(":")

        def pass_on() -> None:
            with contextlib.suppress(OSError):
                while True:
                    ours, _ = listener.accept()
                    with ours, socket.create_connection((host, int(port))) as theirs:
                        threading.Thread(target=_pump, args=(ours, theirs), daemon=True).start()
                        heard = b""
                        while piece := theirs.recv(1 << 16):
                            heard += piece
                            ours.sendall(piece)
                    said.append(heard)

        thread = threading.Thread(target=pass_on, daemon=True)
        thread.start()
        probe.probe(f"127.0.0.1:{listener.getsockname()[1]}")
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    return tuple(filter(None, said))


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)


# -- drivers and engines -----------------------------------------------------------------------------


def _numbers(data: bytes) -> Iterator[int]:
    """The bytes as an endless list of choices."""
    yield from data
    while True:
        yield 0


_STRANGE = (0.0, 1.0, -1.0, 0.5, 2.0, 1e30, -1e30, 1e308, float("inf"), float("-inf"), float("nan"), 2.0**31, 2.0**53,
            2.0**63, -2.0**63, 140737488355328.0, 140737488355329.0, float(0x7FFFFFFFFFFFFFF0), 1e-320, 83.0)


def _int64(value: float) -> int:
    return max(-2**63, min(2**63 - 1, int(value))) if math.isfinite(value) else 0x7FFFFFFFFFFFFFF3


def _dcgm(folder: Path, data: bytes) -> None:
    """A host engine with any figures, statuses, counts and refusals, with lost GPUs and MIG instances, seen by
    ``--source dcgm`` and by an export."""
    choice = _numbers(data)
    fields = sorted(DOUBLES | INTEGERS)
    scene = Scene(folder / "root", 4 if next(choice) % 2 else 3)
    try:
        scene.engine.wild_counts = next(choice) > 200
        scene.engine.gpus[0].instances = {4: next(choice), 5: next(choice)} if next(choice) > 128 else {}
        scene.engine.lost = {0} if next(choice) > 230 else set()
        source = DcgmSource(scene.client, (), watch=bool(next(choice) % 2), root=scene.root)
        source.open()
        session = Session(source, clock=lambda: scene.now_s)
        for _ in range(3):
            for _ in range(next(choice) % 24):
                gpu, field = next(choice) % 2, fields[next(choice) % len(fields)]
                value = _STRANGE[next(choice) % len(_STRANGE)]
                scene.engine.figures[gpu, field] = value if field in DOUBLES else _int64(value)
            for key, sample in scene.engine.samples.items():
                if next(choice) > 200:
                    scene.engine.samples[key] = replace(sample, status=-next(choice) % 80,
                                                                    time_us=next(choice) * 10**15)
            if next(choice) > 220:
                scene.engine.fails = {"dcgmEntitiesGetLatestValues": -(next(choice) % 60)}
            if next(choice) > 240:
                scene.engine.xid(0, next(choice) - 100)
            if next(choice) > 230:
                scene.engine.lost ^= {next(choice) % 2}
                scene.now_s += next(choice)
            scene.step()
            gpus = tuple(gpu.read(scene.now_s) for gpu in source.gpus)
            session.feed.on_sample(replace(node_sample(0, 0), time_s=scene.now_s, gpus=gpus))
        _written(session, next(choice))
    finally:
        scene.close()


@functools.cache
def _nvml_library() -> FakeNvml:
    library = FakeNvml(Path(os.environ["FUZZ_NVML"]))
    library._library.fake_setting.argtypes = [ctypes.c_char_p]
    return library


_NVML_CALLS = ("*", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetPowerUsage",
               "nvmlDeviceGetTemperature", "nvmlDeviceGetClockInfo", "nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3",
               "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlGpmMetricsGet", "nvmlDeviceGetFieldValues",
               "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetUUID", "nvmlDeviceGetEncoderUtilization",
               "nvmlDeviceGetProcessUtilization", "field:197", "field:138", "gpm:2", "nvmlSystemGetDriverVersion",
               "nvmlDeviceGetPcieThroughput", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetMaxClockInfo")
_NVML_VALUES = ("util", "memory_used_mib", "memory_total_mib", "power_w", "limit_w", "temperature", "sm_clock",
                "sm_clock_max", "pcie_gen", "pcie_width", "pcie_tx_mib", "reasons", "sm_active", "nvlink_tx_mib",
                "counter_bits", "encoder", "ecc_corrected", "row_remap_pending")


def _nvml(folder: Path, data: bytes) -> None:
    """A driver with any values, refusals and garbage, seen by an export."""
    choice = _numbers(data)
    lines = [f"gpus {next(choice) % 4}", f"gpm {next(choice) % 2}"]
    for _ in range(next(choice) % 8):
        gpu, kind = next(choice) % 4 - 1, next(choice) % 4
        call = _NVML_CALLS[next(choice) % len(_NVML_CALLS)]
        if kind == 0:
            value = _STRANGE[next(choice) % len(_STRANGE)]
            lines.append(f"set {_NVML_VALUES[next(choice) % len(_NVML_VALUES)]} {value} {gpu}")
        elif kind == 1:
            lines.append(f"refuse {call} {next(choice) % 31} {gpu}")
        elif kind == 2:
            pattern = ("ff", "a5", "random")[next(choice) % 3]
            lines.append(f"fault {call} {max(gpu, 0)} {1 + next(choice) % 9} {1 + next(choice) % 3} garbage {pattern}")
        else:
            kind_of_process = "CGB"[next(choice) % 3]
            lines.append(f"process {max(gpu, 0)} {next(choice) * 65537} {next(choice) * 1e9:g} {kind_of_process} "
                         f"{next(choice)}")
    if next(choice) > 200:
        lines.append(f"name H100 \\x1b[31m\\x{next(choice):02x}\\xff\\x0a")
    with _nvml_library() as fake:
        fake.configure(*lines)
        now_s = START_S
        source = NvmlSource(clock=lambda: now_s, wall_clock=lambda: now_s)
        source.open()
        try:
            session = Session(source, clock=lambda: now_s)
            for after_s in (0.0, 1.0, 11.0):
                now_s += after_s
                fake.set_time(now_s)
                gpus = tuple(gpu.read(now_s) for gpu in source.gpus)
                session.feed.on_sample(replace(node_sample(0, 0), time_s=now_s, gpus=gpus))
            _written(session, next(choice))
        finally:
            source.close()


# -- the ranks of a job --------------------------------------------------------------------------


def _ras(read: Callable[[bytes, float], RasAnswer]) -> Callable[[Path, bytes], None]:
    def run(folder: Path, data: bytes) -> None:
        answer = read(data, 0.0)
        absence = find_absence(answer, answer)
        if absence is not None:
            texts = [title(absence), counts_text(absence), *map(place_text, absence.absent[:4])]
            assert all(text.isprintable() for text in texts)

    return run


def _stuck(_: Path) -> list[Job]:
    return [Job((100, 99, 100), gathers=(7, 7, 8), gone=frozenset(gone), version=version)
            for gone in ((), (0,)) for version in ("2.25.1", "2.27.7", "2.28.7", "2.29.2")]


def _stacks(folder: Path, data: bytes) -> None:
    threads = read_dump(data, 7)
    ranks = [ProcessStacks(7, "rank 0", "train.py", threads), ProcessStacks(8, "rank 1", "train.py", threads[:1])]
    assert all(line.isprintable() for line in stack_groups.report([ranks], threads=True))


_DUMP = json.dumps([{
    "pid": 7, "thread_id": 1, "thread_name": name, "os_thread_id": 6 + number, "active": True, "owns_gil": False,
    "frames": [{"name": "all_reduce", "filename": "/x/site-packages/torch/c10d.py", "module": None, "line": 9},
               {"name": "step", "filename": "/home/ana/train.py", "module": None, "line": 112}]}
    for number, name in enumerate(("load", "MainThread"))], indent=2).encode()


def _choices(_: Path) -> list[bytes]:
    return [bytes(range(256)), bytes((7 * i * i + 13) % 256 for i in range(256)), bytes(255 - i for i in range(256))]


TARGETS = {target.name: target for target in (
    Target("xspace", "protobuf", _xspaces, _trace("x.xplane.pb")),
    Target("xspace-gz", "protobuf.gz", lambda f: [gzip.compress(x) for x in _xspaces(f)], _trace("x.xplane.pb.gz"), 2),
    Target("chrome", "json", _chrome, _trace("x.json")),
    Target("chrome-gz", "json.gz", lambda f: [gzip.compress(x) for x in _chrome(f)], _trace("x.json.gz"), 2),
    Target("nsys", "sqlite", _nsys, _trace("x.sqlite")),
    Target("analysis", "json", lambda _: [(DATA / "v0_1_0/analysis.json").read_bytes()], _analysis),
    Target("snapshot", "json", _snapshots, _snapshot, 2),
    Target("recording", "recording", _recordings, _recording, 2),
    Target("config", "text", lambda _: [_CONFIG], _config),
    Target("rules", "text", _rule_files, _rules),
    Target("answer", "protobuf", _answers, _answer),
    Target("greeting", "bytes", lambda _: [*_heard(), b"HTTP/1.1 400 Bad\r\n\r\n", b"SSH-2.0-x\r\n"], _greeting),
    Target("dcgm", "bytes", _choices, _dcgm, 2),
    Target("nvml", "bytes", _choices, _nvml, 2),
    Target("ras-text", "text", lambda f: [as_text(job) for job in _stuck(f)], _ras(read_text)),
    Target("ras-json", "json", lambda f: [as_json(job) for job in _stuck(f)], _ras(read_json)),
    Target("stacks", "json", lambda _: [_DUMP], _stacks),
    *fuzz_cluster.TARGETS,
    *fuzz_kineto.TARGETS,
    *fuzz_ranks.TARGETS,
    *fuzz_process.targets(_recordings, lambda f: [write(job) for job in _stuck(f) for write in (as_text, as_json)]),
)}
