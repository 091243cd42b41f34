"""Synthetic jobs whose calls and copies hold the GPUs up, or whose GPUs do not begin their steps together."""

from __future__ import annotations

from gputop.trace.model import Kind, MemoryKind
from tests.advice.trace.traces import KERNEL, STEP, STEPS, fill, job
from tests.trace.build import Builder

GIB = 2**30
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def allocating(call: str = "cudaFree", steps: range = range(STEPS), framework: str = "aten::add", takes: float = 2_000,
               marked: bool = True) -> Builder:
    """In the midst of these steps a call for which all work is awaited, and which launches nothing meanwhile."""
    b = job() if marked else Builder()
    b.host(framework, 0, 1)
    for i in range(STEPS):
        at = i * STEP + 100
        for half in range(2):
            begin = at
            for k in range(40):
                b.run(0, at, 200, KERNEL, launch=max(begin - 60 + k * 10, 0), launch_length=5)
                at += 202
            if half == 0 and i in steps:
                b.host(call, begin + 400, at - begin - 400 + takes, line="launch 0")
                at += takes + 70
            elif half == 0:
                at += 2
    return b


def one_stream(memory: MemoryKind = MemoryKind.PINNED, stream: int = 1, length: float = 2_000,
               framework: str = "aten::add") -> Builder:
    """Each step begins with a copy, then computes; ``stream``: that of the copy."""
    b = job()
    b.host(framework, 0, 1)
    for i in range(STEPS):
        b.run(0, i * STEP + 50, length, "MemcpyH2D", kind=Kind.H2D, launch=i * STEP + 10, size=50_000_000, src=memory,
              dst=MemoryKind.DEVICE, stream=stream)
    fill(b, 0, length + 60, STEP, 196, 4, queued=20)
    return b


def staggered(each: float, shared: bool = True, gpus: int = 4) -> Builder:
    b = job(gpus)
    for i in range(STEPS):
        for gpu in range(gpus):
            behind = gpu * each
            for k in range(100):
                b.run(gpu, i * STEP + 100 + behind + k * 100, 98, KERNEL,
                      launch=i * STEP + 20 + behind + k * each / 100, launch_length=0.5,
                      thread="python" if shared else None)
            end = i * STEP + 100 + (gpus - 1) * each + 10_200
            b.run(gpu, i * STEP + 10_150 + behind, end - (i * STEP + 10_150 + behind), NCCL, kind=Kind.COLLECTIVE,
                  launch=i * STEP + 90 + behind)
    return b


def fetching(count: int, idle: float, *, sync: bool = True, call: bool = False, at_end: bool = False,
             way: Kind = Kind.D2H) -> Builder:
    """``count`` values are copied in each step; see ``waiting_for``."""
    return waiting_for(*[(way, 4)] * (count + at_end), pieces=count + 1, idle=idle, takes=2, sync=sync, call=call)


def waiting_for(*copies: tuple[Kind, int], pieces: int = 0, idle: float = 400, takes: float = 100, sync: bool = True,
                call: bool = False) -> Builder:
    """Each step has these copies, of so many bytes and ``takes`` µs, evenly spread; the host launches the kernels
    before each at once, waits for the copy, and needs ``idle`` µs to launch on."""
    b = job()
    pieces = pieces or len(copies) + 1
    for i in range(STEPS):
        t = i * STEP + 100
        for k in range(pieces):
            launch = t - 8
            while t < i * STEP + 100 + (k + 1) * 17_000 / pieces:
                b.run(0, t, 96, KERNEL, launch=launch, launch_length=2)
                t, launch = t + 100, launch + 3
            if k < len(copies):
                way, size = copies[k]
                b.run(0, t, takes, f"Memcpy{way.name}", kind=way, launch=launch, size=size, src=MemoryKind.PINNED,
                      dst=MemoryKind.PINNED, launch_length=t + takes + 2 - launch if sync and not call else 2)
                if call:
                    b.host("cuStreamSynchronize", launch + 2, t + takes - launch, line="launch 0")
                t += takes + idle
    return b


def reducing(transfer: float, count: int = 1, late: float = 0.0, gpus: int = 4, compute: float = 14_000,
             link: bool = False, hidden: bool = False) -> Builder:
    """Compute, then ``count`` AllReduces of ``transfer`` µs; the last GPU begins its compute ``late`` µs later."""
    b = job(gpus)
    for gpu in range(gpus):
        behind = late if gpu == gpus - 1 else 0.0
        fill(b, gpu, 100 + behind, 100 + behind + compute, 98, 2, queued=90)
        for i in range(STEPS):
            if link:
                b.run(gpu, i * STEP + 10, 84, "MemcpyH2D", kind=Kind.H2D, launch=i * STEP, size=1_000_000,
                      src=MemoryKind.PINNED, dst=MemoryKind.DEVICE)
            begin = i * STEP + 100 + (0 if hidden else compute)
            joined = begin + late
            for k in range(count):
                start = begin + behind if k == 0 else joined + k * (transfer + 1)
                b.run(gpu, start, joined + k * (transfer + 1) + transfer - start, NCCL, kind=Kind.COLLECTIVE,
                      launch=max(begin - 500, 0), stream=2)
    return b


def with_memory(b: Builder, peak_gib: float, gpus: int = 1) -> Builder:
    """Of 40 GiB each of these GPUs uses at most so much."""
    for gpu in range(gpus):
        b.memory(5, f"GPU_{gpu}_bfc", int(peak_gib * GIB / 2), int((40 - peak_gib / 2) * GIB), int(peak_gib * GIB))
    return b
