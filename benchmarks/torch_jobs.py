"""Real PyTorch jobs on the CPU, captured on demand from their middle: gputop's steps and findings beside the truth.

    python benchmarks/torch_jobs.py --torch-python PATH [--ms 4000] [--stacks] [--keep FOLDER] [JOB…]

A job marks nothing. It logs the begin and the end of each step and of each evaluation; that log, cut to what the
recording holds, is the truth. The capture is kineto's daemon mode: the job is started with KINETO_USE_DAEMON=1, and a
small daemon in this file answers it. Prints a table in Markdown. PATH is a Python that has PyTorch.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import os
import random
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEADER = "N32s"  # of a datagram: size of the body, type
STEPS_BEFORE, START_S, GIVES_UP_S = 5, 6.0, 300.0
FEATURES = 256


@dataclass(frozen=True)
class Job:
    """``first`` is the id of the finding that must come first, "" where nothing of weight may be said."""

    run: str
    first: str = ""
    ranks: int = 1
    steps: bool = True  # whether there are any to find
    least_ms: int = 0  # of a capture: its steps take long


JOBS = {
    "workers0": Job("no_workers", "input_bound"), "slow-workers": Job("slow_workers", "input_bound"),
    "item": Job("metrics_per_sample", "step_gap_host"), "python": Job("python_metrics", "step_gap_host"),
    "evaluation": Job("evaluation", "evaluation_share"), "recompile": Job("recompile", "retracing", least_ms=10_000),
    "slow-rank": Job("slow_rank", "step_gap_host", ranks=2), "checkpoint": Job("checkpoint"),
    "gc": Job("garbage"), "accumulation": Job("accumulation"), "gan": Job("gan"), "critic": Job("critic"),
    "lbfgs": Job("lbfgs"), "rollout": Job("rollout"), "own-update": Job("own_update"), "healthy": Job("healthy"),
    "inference": Job("inference"), "server": Job("server"), "evaluate-only": Job("evaluate_only"),
    "generate": Job("generate", steps=False), "irregular": Job("irregular", steps=False),
}


# -- the jobs: run in the Python that has PyTorch ---------------------------------------------------------

def run_job(name: str, log_path: str) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    log = Path(log_path).open("a", buffering=1)  # noqa: SIM115 - until the job is ended
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loss_of = nn.CrossEntropyLoss()

    def mark(what: str) -> None:
        log.write(f"{time.time():.6f} {what}\n")

    def mlp(inputs: int = FEATURES, hidden: int = 256, layers: int = 2) -> Any:
        parts: list[Any] = [nn.Linear(inputs, hidden), nn.ReLU()]
        for _ in range(layers):
            parts += [nn.Linear(hidden, hidden), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(hidden, 10))

    class Samples(Dataset):
        def __init__(self, count: int = 100_000, cost_s: float = 0.0) -> None:
            self.count, self.cost_s = count, cost_s

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> tuple[Any, int]:
            until, sample = time.perf_counter() + self.cost_s, torch.rand(FEATURES)
            while time.perf_counter() < until:
                pass
            return sample, index % 10

    def batch(size: int) -> tuple[Any, Any]:
        return torch.rand(size, FEATURES), torch.randint(0, 10, (size,))

    def train(model: Any, loader: Any, after: Callable[[Any, Any], None] | None = None,
              epoch_end: Callable[[], None] | None = None) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        while True:
            mark("begin")
            for x, y in loader:
                optimizer.zero_grad()
                out = model(x)
                loss_of(out, y).backward()
                optimizer.step()
                if after is not None:
                    after(out, y)
                mark("end")
                mark("begin")
            if epoch_end is not None:
                epoch_end()

    def steps(step: Callable[[int], None]) -> None:
        for i in itertools.count():
            mark("begin")
            step(i)
            mark("end")

    def train_on_one_batch(model: Any, size: int, after: Callable[[int, Any], None]) -> None:
        optimizer, (x, y) = torch.optim.Adam(model.parameters()), batch(size)

        def step(i: int) -> None:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            after(i, optimizer)

        steps(step)

    def no_workers() -> None:
        train(mlp(layers=1), DataLoader(Samples(cost_s=0.0005), 32))

    def slow_workers() -> None:
        train(mlp(layers=1), DataLoader(Samples(cost_s=0.001), 32, num_workers=2, persistent_workers=True))

    def healthy() -> None:
        train(mlp(hidden=512), DataLoader(Samples(), 64, num_workers=1, persistent_workers=True, prefetch_factor=4))

    def metrics_per_sample() -> None:
        def confusion(out: Any, y: Any) -> None:
            counts: dict[tuple[int, int], int] = {}
            for i in range(len(y)):
                cell = out[i].argmax().item(), y[i].item()
                counts[cell] = counts.get(cell, 0) + 1

        train(mlp(), DataLoader(Samples(), 64, num_workers=1, persistent_workers=True), confusion)

    def python_metrics() -> None:
        train_on_one_batch(mlp(), 32, lambda i, optimizer: [n * n % 7 for n in range(60_000)] and None)

    def evaluation() -> None:
        model, held_out = mlp(), DataLoader(Samples(16 * 60), 16)

        def validate() -> None:
            mark("evaluation begin")
            with torch.no_grad():
                sum(int((model(x).argmax(1) == y).sum()) for x, y in held_out)
            mark("evaluation end")

        train(model, DataLoader(Samples(16 * 20), 16), epoch_end=validate)

    def checkpoint() -> None:
        model = mlp(hidden=1024)
        train_on_one_batch(model, 32, lambda i, optimizer: torch.save(
            (model.state_dict(), optimizer.state_dict()), f"{log_path}.pt") if i % 10 == 9 else None)

    def garbage() -> None:
        kept = [[i] for i in range(3_000_000)]
        train_on_one_batch(mlp(hidden=512), 128, lambda i, optimizer: gc.collect() and None if i % 25 == 24 else None)
        del kept

    def recompile() -> None:
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1_000_000
        model = mlp()
        compiled, optimizer = torch.compile(model, backend="aot_eager", dynamic=False), torch.optim.SGD(
            model.parameters(), 0.01)

        def step(i: int) -> None:
            optimizer.zero_grad()
            compiled(torch.rand(32 + i, FEATURES)).square().mean().backward()
            optimizer.step()

        steps(step)

    def slow_rank() -> None:
        torch.distributed.init_process_group("gloo")
        late = torch.distributed.get_rank() == 1
        model = nn.parallel.DistributedDataParallel(mlp(hidden=128))
        train_on_one_batch(model, 16, lambda i, optimizer: time.sleep(0.06) if late else None)

    def accumulation() -> None:
        model, loader = mlp(), DataLoader(Samples(), 8)
        optimizer = torch.optim.AdamW(model.parameters())
        mark("begin")
        for micro, (x, y) in enumerate(loader):
            (loss_of(model(x), y) / 4).backward()
            if micro % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                mark("end")
                mark("begin")

    def adversarial(critic_steps: int) -> None:
        generator, critic = mlp(64), mlp(10, layers=1)
        of_generator, of_critic = (torch.optim.Adam(model.parameters()) for model in (generator, critic))

        def step(i: int) -> None:
            for _ in range(critic_steps):
                of_critic.zero_grad()
                made = generator(torch.randn(128, 64)).detach()
                (critic(torch.randn(128, 10)).square().mean() - critic(made).square().mean()).backward()
                of_critic.step()
            of_generator.zero_grad()
            critic(generator(torch.randn(128, 64))).square().mean().backward()
            of_generator.step()

        steps(step)

    def gan() -> None:
        adversarial(1)

    def critic() -> None:
        adversarial(5)

    def lbfgs() -> None:
        model, (x, y) = mlp(), batch(32)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        steps(lambda i: optimizer.step(closure))

    def rollout() -> None:
        model = mlp(8, 64, 1)
        optimizer, dice = torch.optim.Adam(model.parameters()), random.Random(2)

        def step(i: int) -> None:
            seen = []
            with torch.no_grad():
                for _ in range(dice.randint(40, 120)):
                    seen.append(torch.rand(1, 8))
                    model(seen[-1]).argmax()
            optimizer.zero_grad()
            model(torch.cat(seen)).square().mean().backward()
            optimizer.step()

        steps(step)

    def own_update() -> None:
        model, (x, y) = mlp(), batch(64)

        def step(i: int) -> None:
            gradients = torch.autograd.grad(loss_of(model(x), y), list(model.parameters()))
            with torch.no_grad():
                for weight, gradient in zip(model.parameters(), gradients, strict=True):
                    weight -= 0.01 * gradient

        steps(step)

    def answer(model: Any, size: int) -> None:
        with torch.inference_mode():
            model(torch.rand(size, FEATURES)).argmax(1)

    def inference() -> None:
        model = mlp(hidden=1024, layers=6).eval()
        steps(lambda i: answer(model, 256))

    def server() -> None:
        model, dice = mlp(hidden=512).eval(), random.Random(1)

        def serve() -> None:
            while True:
                time.sleep(dice.expovariate(25))
                mark("begin")
                answer(model, dice.choice((1, 2, 4)))
                mark("end")

        worker = threading.Thread(target=serve, daemon=True)
        worker.start()
        worker.join()

    def evaluate_only() -> None:
        model = mlp().eval()
        mark("begin")
        with torch.no_grad():
            for x, _ in DataLoader(Samples(), 64):
                model(x).argmax(1).sum().item()
                mark("end")
                mark("begin")

    def generate() -> None:
        embed, model = nn.Embedding(1000, FEATURES), mlp().eval()

        def step(i: int) -> None:
            tokens = torch.randint(0, 1000, (1, 4))
            with torch.inference_mode():
                for _ in range(16):
                    tokens = torch.cat([tokens, model(embed(tokens))[:, -1:].argmax(-1)], 1)

        steps(step)

    def irregular() -> None:
        dice, x = random.Random(3), torch.rand(128, 128)
        ops = (torch.sin, torch.cos, torch.exp, torch.relu, torch.tanh, torch.matrix_exp, torch.sum, torch.sort)

        def step(i: int) -> None:
            for _ in range(dice.randint(1, 30)):
                dice.choice(ops)(x)

        steps(step)

    locals()[JOBS[name].run]()


# -- the capture ------------------------------------------------------------------------------------------

def capture(name: str, python: str, milliseconds: int, folder: Path, *, stacks: bool) -> list[Path]:
    """The traces of the job's ranks, taken in its middle; its log is ``NAME.log`` in the folder."""
    ranks = JOBS[name].ranks
    sockets = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))  # the whole path of a socket has 107 characters at most
    logs = [folder / (f"{name}.log" if rank == 0 else f"{name}.{rank}.log") for rank in range(ranks)]
    jobs = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(str(sockets / "dynolog"))
        daemon.settimeout(0.5)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = dict(os.environ, KINETO_USE_DAEMON="1", KINETO_IPC_SOCKET_DIR=str(sockets), KINETO_LOG_LEVEL="5",
                           KINETO_ONDEMAND_TRACE_DIR=str(sockets), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=str(port))
        try:
            for rank, log in enumerate(logs):
                log.write_text("")
                jobs.append(subprocess.Popen([python, __file__, "--run", name, str(log)],
                                             env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)),
                                             stderr=subprocess.DEVNULL))  # of a rank that is ended first
            config = (f"ACTIVITIES_LOG_FILE={sockets}/trace.json\n"
                      f"ACTIVITIES_DURATION_MSECS={max(milliseconds, JOBS[name].least_ms)}\n"
                      "ACTIVITIES_WARMUP_PERIOD_SECS=0\n")
            config += "PROFILE_WITH_STACK=true\nPROFILE_WITH_MODULES=true\n" if stacks else ""
            wanted = {job.pid: sockets / f"trace_{job.pid}.json" for job in jobs}
            _answer(daemon, wanted, logs[0], config)
            traces = []
            for rank, path in enumerate(wanted.values()):
                traces.append(folder / f"{name}.rank{rank}.pt.trace.json.gz")
                with path.open("rb") as source, gzip.open(traces[-1], "wb") as target:
                    shutil.copyfileobj(source, target)
            return traces
        finally:
            for job in jobs:
                job.kill()
                job.wait()
            shutil.rmtree(sockets)
            Path(f"{logs[0]}.pt").unlink(missing_ok=True)


def _answer(daemon: socket.socket, wanted: dict[int, Path], log: Path, config: str) -> None:
    """Give each process the config once, together, and wait until all have written their traces."""
    begun, start, told = time.monotonic(), None, set()
    while not all(path.exists() for path in wanted.values()):
        if time.monotonic() - begun > GIVES_UP_S:
            raise SystemExit(f"no trace came: {log}")
        if start is None and time.monotonic() - begun > START_S and log.read_text().count(" end\n") >= STEPS_BEFORE:
            start = time.time() + (6.5 if len(wanted) > 1 else 0.0)  # each process polls once in 5 s
        try:
            data, _, _, client = daemon.recvmsg(1 << 16)
        except TimeoutError:
            continue
        kind, _, _, pid = struct.unpack_from("iiqi", data, struct.calcsize(HEADER))
        body = ""
        if start is not None and kind in (2, 3) and pid in wanted.keys() - told:
            told.add(pid)
            body = config + (f"PROFILE_START_TIME={int(start * 1000)}\n" if len(wanted) > 1 else "")
        daemon.sendto(struct.pack(HEADER, len(body), b"req") + body.encode(), client)


# -- the truth, and what gputop says ------------------------------------------------------------------------

def truth(trace: Path, log: Path) -> tuple[int, float | None, float]:
    """Steps that end within the recording, their median in seconds, and seconds of evaluation in it."""
    with gzip.open(trace) as file:
        data = json.load(file)
    base_s = data["baseTimeNanoseconds"] / 1e9
    events = [event for event in data["traceEvents"] if event.get("ph") == "X" and event["cat"] != "Trace"]
    begin = min(event["ts"] for event in events) / 1e6 + base_s
    end = max(event["ts"] + event.get("dur", 0) for event in events) / 1e6 + base_s
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    ends = [float(at) for at, what in lines if what == "end" and begin <= float(at) <= end]
    evaluated, since = 0.0, None
    for at, what in lines:
        if what == "evaluation begin":
            since = float(at)
        elif what == "evaluation end" and since is not None:
            evaluated += max(0.0, min(float(at), end) - max(since, begin))
    lengths = [after - before for before, after in itertools.pairwise(ends)]
    return len(ends), statistics.median(lengths) if lengths else None, evaluated


def row(name: str, traces: list[Path], log: Path) -> str:
    count, median_s, evaluated_s = truth(traces[0], log)
    run = subprocess.run([sys.executable, "-m", "gputop", "analyze", *map(str, traces), "--json"], cwd=ROOT,
                         capture_output=True, text=True, check=True)
    analysis, job = json.loads(run.stdout), JOBS[name]
    steps = analysis.get("steps")
    loud = [f"{one['severity']} {one['id']}" for one in analysis["findings"] if one["severity"] != "low"]
    right = (steps is not None) == job.steps and (not job.steps or median_s is None or abs(
        steps["median_s"] / median_s - 1) < 0.1)
    said = "-" if steps is None else f"{steps['count']} of {1e3 * steps['median_s']:.1f} ms, {steps['anchor']}"
    evaluation = sum(part["time_s"] for part in analysis["wall_time"]["parts"] if part["id"] == "evaluation")
    logged = "-" if median_s is None else f"{count} of {1e3 * median_s:.1f} ms"
    logged += f", evaluation {evaluated_s:.2f} s" if evaluated_s else ""
    said += f", evaluation {evaluation:.2f} s" if evaluation else ""
    as_wanted = (loud[0].endswith(f" {job.first}") if loud else False) if job.first else not loud
    return (f"| {name} | {logged} | {said} | {'yes' if right else '**no**'} | {'; '.join(loud) or '-'} | "
            f"{'yes' if as_wanted else '**no**'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--ms", type=int, default=4000, help="length of a capture")
    parser.add_argument("--stacks", action="store_true", help="with Python functions and modules")
    parser.add_argument("--keep", type=Path, help="folder for traces and logs")
    parser.add_argument("--run", nargs=2, metavar=("JOB", "LOG"), help=argparse.SUPPRESS)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    arguments = parser.parse_args()
    if arguments.run:
        run_job(*arguments.run)
        return
    print("| job | steps by its log | by gputop | to 10% | findings | as wanted |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in arguments.jobs or JOBS:
            traces = capture(name, arguments.torch_python, arguments.ms, folder, stacks=arguments.stacks)
            print(row(name, traces, folder / f"{name}.log"), flush=True)


if __name__ == "__main__":
    main()
