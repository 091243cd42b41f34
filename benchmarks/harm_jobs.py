"""Small training jobs for harm.py: ``harm_jobs.py KIND LOG STATUS``.

Trains until LOG.stop is there, then says "clean end" and ends with STATUS. Every 20 steps a line "STEP LOSS" goes to
LOG, the loss in hexadecimal: the same job without a recording writes the same lines.

plain; threads (two Python threads that each train); workers (a DataLoader with two); ddp (gloo, a rank of two);
compile (torch.compile); busy (never sleeps); forks (a child after each 50 steps, which trains for 50 and must end with
its own status); schedule (its own torch.profiler records 5 of 60 steps, over and over);
profiler (it begins one for five steps after each 200); tf; jax.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVERY = 20
kind, log, status = sys.argv[1:4]
lines = Path(log).open("w", buffering=1)  # noqa: SIM115


def stopped() -> bool:
    """Return whether to end; ranks agree on the step."""
    asked = Path(f"{log}.stop").exists()
    if kind != "ddp":
        return asked
    import torch

    flag = torch.tensor(float(asked))
    torch.distributed.all_reduce(flag)
    return bool(flag)


def train(step: Callable[[], Any], pause_s: float = 0.002, note: bool = True) -> None:
    count = 0
    while not stopped():
        loss = step()
        count += 1
        if note and count % _EVERY == 0:
            lines.write(f"{count} {float(loss).hex()}\n")
        time.sleep(pause_s)


def torch_step(compiled: bool = False, data: Any = None) -> Callable[[], Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)], torch.nn.Linear(32, 1))
    if kind == "ddp":
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    forward = torch.compile(model) if compiled else model
    batch = torch.randn(16, 32)
    batches = iter(data) if data is not None else None

    def step() -> Any:
        nonlocal batches
        inputs = batch
        if batches is not None:
            try:
                inputs = next(batches)
            except StopIteration:
                batches = iter(data)
                inputs = next(batches)
        optimizer.zero_grad()
        loss = forward(inputs).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    if kind == "tf":
        import tensorflow as tf

        tf.random.set_seed(0)
        weights = tf.Variable(tf.ones((32, 32)))

        @tf.function
        def tf_step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(weights @ weights) ** 2)
            weights.assign_sub(1e-4 * tape.gradient(loss, weights))
            return loss

        train(lambda: tf_step().numpy())
    elif kind == "jax":
        import jax
        import jax.numpy as jnp

        update = jax.jit(lambda w: (w - 1e-4 * w, jnp.mean(jnp.tanh(w @ w) ** 2)))
        state = [jnp.ones((32, 32))]

        def jax_step() -> Any:
            state[0], loss = update(state[0])
            return loss

        train(jax_step)
    elif kind == "threads":
        others = [threading.Thread(target=train, args=(torch_step(), 0.001, False)) for _ in range(2)]
        for thread in others:
            thread.start()
        train(torch_step())
        for thread in others:
            thread.join()
    elif kind == "workers":
        import torch

        torch.manual_seed(0)
        train(torch_step(data=torch.utils.data.DataLoader(torch.randn(4096, 32), 16, num_workers=2)))
    elif kind == "forks":
        step, count = torch_step(), 0

        def forking() -> Any:
            nonlocal count
            count += 1
            if count % 50 == 0:
                child = os.fork()
                if not child:
                    for _ in range(50):
                        step()
                    sys.exit(7)
                children.append(child)
            for child in children[:]:
                ended, how = os.waitpid(child, os.WNOHANG)
                if ended:
                    children.remove(child)
                    if os.waitstatus_to_exitcode(how) != 7:
                        print("a child ended with", os.waitstatus_to_exitcode(how), flush=True)
                        os._exit(9)
            return step()

        children: list[int] = []
        train(forking)
        for child in children:
            os.waitpid(child, 0)
    elif kind == "profiler":
        import torch

        step, count = torch_step(), 0

        def at_times() -> Any:
            nonlocal count
            count += 1
            if count % 200:
                return step()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                return [step() for _ in range(5)][-1]

        train(at_times)
    elif kind == "schedule":
        import torch

        step = torch_step()
        schedule = torch.profiler.schedule(wait=53, warmup=2, active=5)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule,
                                    on_trace_ready=lambda _: None) as profiler:
            def profiled() -> Any:
                loss = step()
                profiler.step()
                return loss

            train(profiled, 0.02)
    else:
        train(torch_step(compiled=kind == "compile"), 0.0 if kind == "busy" else 0.002)
    print("clean end", flush=True)
    if kind == "ddp":
        import torch

        torch.distributed.destroy_process_group()
    sys.exit(int(status))


if __name__ == "__main__":
    main()
