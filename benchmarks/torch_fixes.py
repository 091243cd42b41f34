"""Faults of PyTorch loops on the CPU: what gputop says of a capture of the running job, and what the fix brings.

    python benchmarks/torch_fixes.py --torch-python PATH [--seconds 4] [--turns 3] [--cpu] [--keep FOLDER] [JOB…]

Each job is started twice, as it is and with its fix, without anything that gputop needs. Both run by turns (the other
is stopped meanwhile) and log when their steps end: "brought" is by the medians of their steps; with --cpu by the CPU
time of the process, which other programs do not lengthen as much (the jobs have one thread and do not sleep). Then
``gputop capture PID --yes`` records the one with the fault. Healthy jobs have no fix. A promise of "about" is kept
within ten points of a hundred, a bound within three. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS_BEFORE, TURN_S, GIVES_UP_S = 5, 3.0, 180.0
ABOUT, BOUND_ERROR = 0.1, 0.03  # of the step


@dataclass(frozen=True)
class Job:
    """``finding`` is the id that must be among those of weight, "" where none of weight may be; ``young``: it is
    captured at once, before it has run a step."""

    finding: str = ""
    fix: str = ""
    ranks: int = 1
    young: bool = False
    seconds: float = 0.0  # of the capture, where its steps take long


JOBS = {
    "tiny-ops": Job("eager_execution", "one op for all rows"),
    "tiny-ops-compile": Job("eager_execution", "torch.compile"),
    "many-parameters": Job("eager_execution", "Adam(fused=True)"),
    "one-thread": Job("threads_unused", "set_num_threads(2)"),
    "many-threads": Job("thread_oversubscription", "set_num_threads(2)"),
    "leak": Job("", "loss.item()"),
    "recompile": Job("retracing", "dynamic=True", seconds=10.0),
    "compile-start": Job("", young=True, seconds=10.0),
    "print-each-step": Job("", "every hundred steps"),
    "histograms": Job("ops_without_gradient", "every hundred steps"),
    "checkpoint": Job("time_outside_steps", "every 500 steps"),
    "validation": Job("evaluation_share", "no_grad"),
    "accumulation": Job("accumulation_sync", "no_sync", ranks=2),
    "uneven-ranks": Job("step_gap_host", "batches of one size", ranks=2),
    "anomaly": Job("anomaly_mode", "detect_anomaly off"),
    "onednn-off": Job("onednn_off", "mkldnn on"),
    "float64": Job("double_precision", "float32"),
    "tokenize": Job("input_bound", "a worker tokenizes"),
    "zero-grad": Job("gradients_zeroed", "set_to_none=True"),
    "many-workers": Job("", "one worker"),
    "adam-loop": Job("eager_execution", "AdamW(fused=True)"), "adam-large": Job("eager_execution", "AdamW(fused=True)"),
    "momentum-loop": Job("eager_execution", "SGD(fused=True)"), "lstm-cell": Job("eager_execution", "nn.LSTM"),
    "gru-cell": Job("eager_execution", "nn.GRU"), "heads": Job("eager_execution", "one product for all heads"),
    "losses": Job("eager_execution", "one loss for the batch"), "tables": Job("eager_execution", "one table"),
    "average-loop": Job("eager_execution", "_foreach_lerp_"), "clip-loop": Job("eager_execution", "clip_grad_norm_"),
    "anomaly-conv": Job("anomaly_mode", "detect_anomaly off"),
    "anomaly-transformer": Job("anomaly_mode", "detect_anomaly off"),
    "rows": Job("", "a BatchSampler"), "rows-small-model": Job("input_bound", "a BatchSampler"),
    "resnet": Job(), "transformer": Job(), "prefetch": Job(), "ddp": Job(ranks=2), "inference": Job(),
}


# -- the jobs: run in the Python that has PyTorch ---------------------------------------------------------

def run_job(name: str, fixed: bool, log_path: str) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    log = Path(log_path).open("a", buffering=1)  # noqa: SIM115 - until the job is ended
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loss_of = nn.CrossEntropyLoss()

    def loop(step: Callable[[int], Any]) -> None:
        for i in itertools.count():
            step(i)
            log.write(f"{time.time():.6f} {time.process_time():.6f}\n")

    def mlp(inputs: int = 256, hidden: int = 512, layers: int = 2) -> Any:
        parts: list[Any] = [nn.Linear(inputs, hidden), nn.ReLU()]
        for _ in range(layers):
            parts += [nn.Linear(hidden, hidden), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(hidden, 10))

    def train(model: Any, x: Any, y: Any, after: Callable[[int, Any, Any], Any] = lambda i, loss, optimizer: None,
              optimizer: Any = None, set_to_none: bool = True) -> None:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01)

        def step(i: int) -> None:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            after(i, loss, optimizer)

        loop(step)

    def batch(size: int, features: int = 256) -> tuple[Any, Any]:
        return torch.rand(size, features), torch.randint(0, 10, (size,))

    def conv(width: int = 32) -> Any:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
                self.n, self.m = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

            def forward(self, x: Any) -> Any:
                return (x + self.m(self.b(self.n(self.a(x)).relu()))).relu()

        return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), Block(), Block(), Block(), nn.AdaptiveAvgPool2d(1),
                             nn.Flatten(), nn.Linear(width, 10))

    class Samples(Dataset):
        def __init__(self, count: int = 100_000, cost_s: float = 0.0) -> None:
            self.count, self.cost_s = count, cost_s

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> tuple[Any, int]:
            until, sample = time.perf_counter() + self.cost_s, torch.rand(256)
            while time.perf_counter() < until:
                pass
            return sample, index % 10

    def train_from(loader: Any, model: Any = None) -> None:
        model = model or mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))

        def step(i: int) -> None:
            x, y = next(batches)
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

        loop(step)

    def tiny_ops() -> None:
        x, w = torch.rand(400, 16), torch.rand(400, 16, requires_grad=True)
        optimizer = torch.optim.SGD([w], 0.01)

        def step(i: int) -> None:
            optimizer.zero_grad()
            if fixed:
                total = ((x * w).sum(1) - 1).square().sum()
            else:
                total = torch.zeros(())
                for row in range(len(x)):
                    total = total + ((x[row] * w[row]).sum() - 1).square()
            total.backward()
            optimizer.step()

        loop(step)

    def tiny_ops_compile() -> None:
        class Chain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weights = nn.ParameterList([nn.Parameter(torch.rand(32)) for _ in range(40)])

            def forward(self, x: Any) -> Any:
                for w in self.weights:
                    x = torch.tanh(x * w + w).sigmoid() - 0.5 * x
                return x

        model, x = Chain(), torch.rand(16, 32)
        run = torch.compile(model) if fixed else model
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(i: int) -> None:
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()

        loop(step)

    def many_parameters() -> None:
        model = mlp(64, 64, 60)
        train(model, *batch(16, 64), optimizer=torch.optim.Adam(model.parameters(), fused=fixed or None))

    def adam_loop() -> None:
        class Many(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weights = nn.ParameterList([nn.Parameter(torch.randn(16, 16) * 0.1) for _ in range(1200)])

            def forward(self, x: Any) -> Any:
                return x[:, :10] * torch.stack([weight.mean() for weight in self.weights]).mean()

        model = Many()
        train(model, *batch(64), optimizer=torch.optim.AdamW(model.parameters(), **(
            {"fused": True} if fixed else {"foreach": False})))

    def adam_large() -> None:
        model = mlp(256, 512, 6)
        train(model, *batch(64), optimizer=torch.optim.AdamW(model.parameters(), **(
            {"fused": True} if fixed else {"foreach": False})))

    def momentum_loop() -> None:
        model = mlp(64, 64, 80)
        train(model, *batch(16, 64), optimizer=torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, **(
            {"fused": True} if fixed else {"foreach": False})))

    def recurrent(cell: Any, whole: Any, hidden: int) -> None:
        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = whole(32, hidden, batch_first=True) if fixed else cell(32, hidden)
                self.out = nn.Linear(hidden, 10)

            def forward(self, x: Any) -> Any:
                if fixed:
                    return self.out(self.inner(x)[0][:, -1])
                state = None
                for step in range(x.shape[1]):
                    state = self.inner(x[:, step], state)
                return self.out(state[0] if isinstance(state, tuple) else state)

        train(Recurrent(), torch.rand(16, 100, 32), torch.randint(0, 10, (16,)))

    def lstm_cell() -> None:
        recurrent(nn.LSTMCell, nn.LSTM, 32)

    def gru_cell() -> None:
        recurrent(nn.GRUCell, nn.GRU, 64)

    def heads() -> None:
        count, width = 32, 16

        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.project, self.out = nn.Linear(512, 3 * 512), nn.Linear(512, 10)

            def forward(self, x: Any) -> Any:
                parts = self.project(x).chunk(3, -1)
                if fixed:
                    q, k, v = (part.view(*part.shape[:2], count, width).transpose(1, 2) for part in parts)
                    mixed = ((q @ k.transpose(-1, -2) / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
                else:
                    mixed = torch.cat([(q @ k.transpose(-1, -2) / 4).softmax(-1) @ v for q, k, v in (
                        [part[..., i * width:(i + 1) * width] for part in parts] for i in range(count))], -1)
                return self.out(mixed[:, 0])

        train(Attention(), torch.rand(4, 16, 512), torch.randint(0, 10, (4,)))

    def losses() -> None:
        model, (x, y) = mlp(32, 64, 1), batch(256, 32)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(i: int) -> None:
            optimizer.zero_grad()
            out = model(x)
            loss = loss_of(out, y) if fixed else sum(loss_of(out[k:k + 1], y[k:k + 1]) for k in range(256)) / 256
            loss.backward()
            optimizer.step()

        loop(step)

    def tables() -> None:
        count = 64

        class Tables(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(100 * count, 8) if fixed else nn.ModuleList(
                    [nn.Embedding(100, 8) for _ in range(count)])
                self.out, self.begin = nn.Linear(8 * count, 10), 100 * torch.arange(count)

            def forward(self, x: Any) -> Any:
                return self.out(self.table(x + self.begin).flatten(1) if fixed else torch.cat(
                    [table(x[:, i]) for i, table in enumerate(self.table)], 1))

        train(Tables(), torch.randint(0, 100, (64, count)), torch.randint(0, 10, (64,)))

    def average_loop() -> None:
        model = mlp(64, 64, 40)
        weights = list(model.parameters())
        averages = [weight.detach().clone() for weight in weights]

        def average(i: int, loss: Any, optimizer: Any) -> None:
            with torch.no_grad():
                if fixed:
                    torch._foreach_lerp_(averages, weights, 0.01)
                else:
                    for average, weight in zip(averages, weights, strict=True):
                        average.mul_(0.99).add_(weight.detach(), alpha=0.01)

        train(model, *batch(16, 64), after=average)

    def clip_loop() -> None:
        model = mlp(64, 64, 60)
        weights, (x, y) = list(model.parameters()), batch(16, 64)
        optimizer = torch.optim.SGD(weights, 0.01)

        def step(i: int) -> None:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            if fixed:
                nn.utils.clip_grad_norm_(weights, 1.0)
            else:
                with torch.no_grad():
                    norm = sum(weight.grad.pow(2).sum() for weight in weights).sqrt()
                    for weight in weights:
                        weight.grad.mul_((1 / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()

        loop(step)

    def anomaly_conv() -> None:
        torch.autograd.set_detect_anomaly(not fixed)
        model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(),
                              nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        train(model, torch.rand(16, 3, 32, 32), torch.randint(0, 10, (16,)))

    def anomaly_transformer() -> None:
        torch.autograd.set_detect_anomaly(not fixed)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        train(nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(64 * 32, 10)),
              torch.rand(8, 32, 64), torch.randint(0, 10, (8,)))

    def rows(hidden: int = 512, layers: int = 2) -> None:
        from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

        data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
        train_from(DataLoader(data, sampler=BatchSampler(RandomSampler(data), 64, drop_last=False), batch_size=None)
                   if fixed else DataLoader(data, 64, shuffle=True), mlp(64, hidden, layers))

    def rows_small_model() -> None:
        rows(128, 1)

    def one_thread() -> None:
        torch.set_num_threads(2 if fixed else 1)
        train(mlp(1024, 2048, 2), *batch(256, 1024))

    def many_threads() -> None:
        torch.set_num_threads(2 if fixed else 64)
        train(mlp(512, 1024, 2), *batch(128, 512))

    def leak() -> None:
        kept: list[Any] = []
        train(mlp(), *batch(64), after=lambda i, loss, optimizer: kept.append(loss.item() if fixed else loss))

    def recompile() -> None:
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1_000_000
        model = mlp()
        run, optimizer = torch.compile(model, backend="aot_eager", dynamic=fixed), torch.optim.SGD(
            model.parameters(), 0.01)

        def step(i: int) -> None:
            optimizer.zero_grad()
            run(torch.rand(32 + i % 3000, 256)).square().mean().backward()
            optimizer.step()

        loop(step)

    def compile_start() -> None:
        model = mlp(256, 512, 8)
        train(torch.compile(model), *batch(64))

    def print_each_step() -> None:
        with Path(os.devnull).open("w") as null:
            train(mlp(), *batch(64), after=lambda i, loss, optimizer: None if fixed and i % 100 else print(
                i, loss.item(), file=null, flush=True))

    def histograms() -> None:
        model = mlp()

        def write(i: int, loss: Any, optimizer: Any) -> None:
            if not fixed or i % 100 == 0:
                with Path(os.devnull).open("w") as null:
                    for name, weight in model.named_parameters():
                        counts, edges = torch.histogram(weight.detach(), 64)
                        json.dump([name, counts.tolist(), edges.tolist()], null)

        train(model, *batch(64), after=write)

    def checkpoint() -> None:
        model = mlp(256, 1024, 4)
        every = 500 if fixed else 10
        train(model, *batch(64), after=lambda i, loss, optimizer: torch.save(
            (model.state_dict(), optimizer.state_dict()), f"{log_path}.pt") if i % every == every - 1 else None)

    def validation() -> None:
        model, (x, y) = mlp(), batch(64)

        def evaluate(i: int, loss: Any, optimizer: Any) -> None:
            if i % 10 == 9:
                with torch.no_grad() if fixed else contextlib.nullcontext():
                    sum(float((model(x).argmax(1) == y).float().mean()) for _ in range(30))

        train(model, x, y, after=evaluate)

    def distributed(model: Any) -> Any:
        torch.distributed.init_process_group("gloo")
        return nn.parallel.DistributedDataParallel(model)

    def accumulation() -> None:
        model = distributed(mlp(256, 1024, 2))
        optimizer, (x, y) = torch.optim.SGD(model.parameters(), 0.01), batch(32)

        def step(i: int) -> None:
            for micro in range(8):
                with model.no_sync() if fixed and micro < 7 else contextlib.nullcontext():
                    (loss_of(model(x), y) / 8).backward()
            optimizer.step()
            optimizer.zero_grad()

        loop(step)

    def uneven_ranks() -> None:
        model = distributed(mlp())
        late = torch.distributed.get_rank() == 1 and not fixed
        train(model, *batch(64), after=lambda i, loss, optimizer: [n * n % 7 for n in range(400_000)] and None
              if late else None)

    def anomaly() -> None:
        torch.autograd.set_detect_anomaly(not fixed)
        train(mlp(256, 128, 12), *batch(32))

    def onednn_off() -> None:
        torch.backends.mkldnn.enabled = fixed
        train(conv(), torch.rand(16, 3, 24, 24), torch.randint(0, 10, (16,)))

    def float64() -> None:
        model, (x, y) = mlp(256, 1024, 2), batch(128)
        train(model if fixed else model.double(), x if fixed else x.double(), y)

    def tokenize() -> None:
        words = [f"word{n}" for n in range(5000)]
        number = {word: n for n, word in enumerate(words)}
        texts = [" ".join(words[(n * k) % 5000] for k in range(1, 120)) for n in range(512)]

        class Texts(Dataset):
            def __len__(self) -> int:
                return 100_000

            def __getitem__(self, index: int) -> str:
                return texts[index % 512]

        def collate(rows: list[str]) -> tuple[Any, Any]:
            ids = [[number[word.strip(",.;").lower()] for word in text.split()][:64] for text in rows]
            return torch.tensor(ids), torch.tensor([len(text) % 10 for text in rows])

        model = nn.Sequential(nn.Embedding(5000, 32), nn.Flatten(), nn.Linear(64 * 32, 64), nn.ReLU(),
                              nn.Linear(64, 10))
        train_from(DataLoader(Texts(), 64, collate_fn=collate, num_workers=int(fixed), persistent_workers=fixed), model)

    def zero_grad() -> None:
        train(mlp(256, 1024, 4), *batch(32), set_to_none=fixed)

    def many_workers() -> None:
        train_from(DataLoader(Samples(cost_s=0.0002), 64, num_workers=1 if fixed else 16, persistent_workers=True))

    def resnet() -> None:
        train(conv(), torch.rand(32, 3, 24, 24), torch.randint(0, 10, (32,)))

    def transformer() -> None:
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        model = nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(128 * 64, 10))
        train(model, torch.rand(16, 64, 128), torch.randint(0, 10, (16,)),
              optimizer=torch.optim.AdamW(model.parameters(), fused=True))

    def prefetch() -> None:
        train_from(DataLoader(Samples(), 64, num_workers=1, persistent_workers=True, prefetch_factor=4))

    def ddp() -> None:
        train(distributed(mlp(256, 1024, 2)), *batch(128))

    def inference() -> None:
        model, x = mlp(256, 1024, 6).eval(), torch.rand(256, 256)

        def answer(i: int) -> None:
            with torch.inference_mode():
                model(x).argmax(1)

        loop(answer)

    locals()[name.replace("-", "_")]()


# -- running and capturing them ---------------------------------------------------------------------------

class Running:
    """The processes of a job; the log is the first one's."""

    def __init__(self, name: str, python: str, folder: Path, *, fixed: bool) -> None:
        self.log = folder / f"{name}{'.fixed' if fixed else ''}.log"
        self.log.write_text("")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = JOBS[name].ranks
        several = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if ranks > 1 else {}
        self.processes = [subprocess.Popen(
            [python, __file__, "--run", name, "fixed" if fixed else "", str(self.log if not rank else
                                                                           self.log.with_suffix(f".{rank}.log"))],
            env={**os.environ, **several, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if several else {})},
            stderr=subprocess.DEVNULL, start_new_session=True) for rank in range(ranks)]

    def signal(self, number: int) -> None:
        for process in self.processes:  # with its workers
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def ends(self) -> list[tuple[float, float]]:
        """When each step ended, and the CPU time of the process by then."""
        return [(float(line.split()[0]), float(line.split()[1])) for line in self.log.read_text().splitlines()
                if len(line.split()) == 2]

    def wait_for_steps(self) -> None:
        begun = time.monotonic()
        while len(self.ends()) < STEPS_BEFORE:
            if time.monotonic() - begun > GIVES_UP_S or any(p.poll() is not None for p in self.processes):
                raise SystemExit(f"does not run: {self.log}")
            time.sleep(0.2)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        Path(f"{self.log}.pt").unlink(missing_ok=True)


@contextlib.contextmanager
def running(name: str, python: str, folder: Path, *, fixed: bool = False) -> Iterator[Running]:
    job = Running(name, python, folder, fixed=fixed)
    try:
        yield job
    finally:
        job.close()


def by_turns(jobs: list[Running], turns: int, *, cpu: bool) -> list[float]:
    """The mean step of each in seconds, of the clock or of the CPU, the median of its turns."""
    for job in jobs:
        job.wait_for_steps()
        job.signal(signal.SIGSTOP)
    means: list[list[float]] = [[] for _ in jobs]
    for _ in range(turns):
        for job, own in zip(jobs, means, strict=True):
            begun = time.time()
            job.signal(signal.SIGCONT)
            deadline = begun + max(10 * TURN_S, 60)
            while time.time() < begun + TURN_S or (
                    sum(end > begun for end, _ in job.ends()[-3:]) < 3 and time.time() < deadline):
                time.sleep(0.1)
            job.signal(signal.SIGSTOP)
            ends = [times[cpu] for times in job.ends() if times[0] > begun]
            if len(ends) > 1:
                own.append((ends[-1] - ends[0]) / (len(ends) - 1))
    return [statistics.median(own) if own else float("nan") for own in means]


def capture(job: Running, seconds: float, logdir: Path) -> dict[str, Any]:
    """What gputop prints of a capture of these processes."""
    pids = [str(process.pid) for process in job.processes]
    done = subprocess.run([sys.executable, "-m", "gputop", "capture", *pids, "--yes", "--json", "--seconds",
                           f"{seconds:g}", "--logdir", str(logdir)], cwd=ROOT, capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kept(gain: dict[str, Any], brought: float) -> str:
    """Whether the fix brought what its claim says."""
    more = brought - gain["step_time"]
    within = {"at least": more >= -BOUND_ERROR, "about": abs(more) <= ABOUT}.get(gain["claim"], more <= BOUND_ERROR)
    return "yes" if within else "**no**"


def row(name: str, python: str, seconds: float, turns: int, folder: Path, *, cpu: bool) -> str:
    about = JOBS[name]
    before = after = None
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(running(name, python, folder))
        if about.fix and turns:
            fixed = stack.enter_context(running(name, python, folder, fixed=True))
            before, after = by_turns([job, fixed], turns, cpu=cpu)
            fixed.close()
            job.signal(signal.SIGCONT)
        elif about.young:
            time.sleep(3.0)  # Python has imported torch
        if not about.young:
            job.wait_for_steps()
        found = capture(job, about.seconds or seconds, folder / name)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    analysis = found.get("analysis") or found
    loud = [one for one in analysis["findings"] if one["severity"] != "low"]
    said = "; ".join(f"{one['severity']} {one['id']}" for one in loud) or "-"
    cause = about.finding or "input_bound"
    gain = next((one["gain"] for one in analysis["findings"] if one["id"] == cause and one["gain"]["step_time"]), None)
    promise = "- | -" if gain is None else f"{gain['claim']} {gain['step_time']:.0%} | " + (
        kept(gain, 1 - after / before) if before and after else "-")
    right = any(one["id"] == about.finding for one in loud) if about.finding else not loud
    steps = "-" if before is None or after is None else f"{1e3 * before:.1f} → {1e3 * after:.1f} ms"
    brought = "-" if before is None or after is None else f"{1 - after / before:.0%}"
    wanted = "yes" if right else "**no**"
    return f"| {name} | {about.fix or '-'} | {steps} | {brought} | {said} | {promise} | {wanted} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a capture")
    parser.add_argument("--turns", type=int, default=3, help="of each job; 0: the fix is not measured")
    parser.add_argument("--cpu", action="store_true", help="measure what a fix brings in CPU time")
    parser.add_argument("--keep", type=Path, help="folder for traces, findings and logs")
    parser.add_argument("--run", nargs=3, metavar=("JOB", "FIXED", "LOG"), help=argparse.SUPPRESS)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    arguments = parser.parse_args()
    if arguments.run:
        run_job(arguments.run[0], bool(arguments.run[1]), arguments.run[2])
        return
    print("| job | fix | step | brought | findings of weight | promised | kept | as wanted |\n"
          "|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for name in arguments.jobs or JOBS:
            try:
                print(row(name, arguments.torch_python, arguments.seconds, arguments.turns, folder,
                          cpu=arguments.cpu), flush=True)
            except (RuntimeError, KeyError) as error:
                print(f"| {name} | {str(error).strip()} |", flush=True)


if __name__ == "__main__":
    main()
