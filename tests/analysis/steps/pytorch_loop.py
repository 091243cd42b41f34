"""A PyTorch training loop on the CPU as its profiler records it."""

from __future__ import annotations

import random

import numpy as np

from tests.trace.build import Builder

NODE = "autograd::engine::evaluate_function: {}Backward0"


class Loop:
    """A PyTorch loop on one thread; ``now`` is the time in µs up to which it has run."""

    def __init__(self, seed: int = 0) -> None:
        self.b, self.now, self.random = Builder(gpus=0, format="chrome"), 0.0, random.Random(seed)
        self.begins: list[float] = []

    def op(self, name: str, length: float = 0.0, pause: float | None = None) -> Loop:
        length = length or self.random.uniform(5, 20)
        self.b.host(name, self.now, length)
        self.now += length + (self.random.uniform(1, 3) if pause is None else pause)
        return self

    def forward(self, layers: int = 3) -> Loop:
        for _ in range(layers):
            self.op("aten::linear").op("aten::relu")
        return self

    def backward(self, layers: int = 3) -> Loop:
        self.op(NODE.format("Nll"))
        for _ in range(layers):
            self.op(NODE.format("Relu")).op(NODE.format("Addmm"))
        return self

    def zero(self) -> Loop:
        return self.op("Optimizer.zero_grad#SGD.zero_grad", 3)

    def update(self, name: str = "SGD") -> Loop:
        return self.op(f"Optimizer.step#{name}.step", 30)

    def step(self) -> Loop:
        self.begins.append(self.now)
        return self

    def sleep(self, time: float) -> Loop:
        self.now += time
        return self

    @property
    def period_s(self) -> float:
        return float(np.median(np.diff(self.begins))) / 1e6
