"""Writes XSpaces of any size like those of a data-parallel training job, for the benchmarks of the trace engine.

A step is a ``train`` marker, per GPU a copy in, kernels with launch, op name and kernel details,
and collectives that end together on all GPUs; half of the events are the host's. Encoded by
hand and written line by line, so that eight million events need little memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_KERNELS = tuple(f"void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm_{i}>(Params)" for i in range(400))
_COPY, _COLLECTIVE = "MemcpyH2D", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_CALLS = ("cuLaunchKernel", "MatMul", "cuMemcpyHtoDAsync_v2", "train")
_OPS = tuple(f"model/layer_{i}/dense/MatMul:MatMul" for i in range(200))
_DETAILS = tuple(f"regs:{32 + 8 * (i % 12)} static_shared:0 dynamic_shared:{i % 5 * 8192} grid:{64 + i},1,1 "
                 f"block:256,1,1 occ_pct:{50 + i % 3 * 25}" for i in range(60))
_COPY_DETAILS = "kind_src:pinned kind_dst:device size:4194304 dest:0 async:1"
_STATS = ("correlation_id", "kernel_details", "tf_op", "device_id", "context_id", "step_num", "_r", "memcpy_details",
          "profile_start_time", "profile_stop_time", "group_name")
_START_NS = 1_700_000_000_000_000_000
_KERNELS_PER_STEP = 500
_COLLECTIVE_EVERY = 50
_PACE_PS = 20_000_000  # from kernel to kernel
_ID = {name: i for i, name in enumerate((*_STATS, *_OPS, *_DETAILS, _COPY_DETAILS), 1)}


def write(path: Path, events: int, gpus: int = 8) -> None:
    """Write an XSpace with about that many events, on ``gpus`` GPUs and as many launching threads."""
    each = events // (2 * gpus)
    with path.open("wb") as file:
        for gpu in range(gpus):
            lines = [_line(f"Stream #{13 + gpu}(Kernel,MemcpyH2D)", 13, 1000, _device(gpu, each))]
            _plane(file, f"/device:GPU:{gpu}", (*_KERNELS, _COPY, _COLLECTIVE), iter(lines))
        host = (_line(f"tf_Compute/{gpu}", gpu + 1, 900, _host(gpu, each)) for gpu in range(gpus))
        marks = (_line("python", 99, 900, _markers(each)) for _ in range(1))
        _plane(file, "/host:CPU", _CALLS, (line for part in (host, marks) for line in part))
        stop = _START_NS + each * _PACE_PS // 1000
        stats = _field(6, _stat("profile_start_time", _START_NS)) + _field(6, _stat("profile_stop_time", stop))
        _plane(file, "Task Environment", (), iter(()), stats)
        file.write(_field(4, b"benchmark"))


def _device(gpu: int, count: int) -> Iterator[bytes]:
    context = _field(4, b"\x08" + _varint(_ID["context_id"]) + _field(5, b"$$1"))
    # What kernel i always has besides its correlation id.
    fixed = [context + _field(4, _reference("kernel_details", _DETAILS[i % len(_DETAILS)]))
             + _field(4, _reference("tf_op", _OPS[i % len(_OPS)])) for i in range(len(_KERNELS))]
    copy = context + _field(4, _reference("memcpy_details", _COPY_DETAILS))
    names = [b"\x08" + _varint(i + 1) + b"\x10" for i in range(len(_KERNELS) + 2)]
    for i in range(count):
        at, n = i * _PACE_PS + 9_876_543, i % _KERNELS_PER_STEP
        correlation = _field(4, _stat("correlation_id", gpu * count + i + 1))
        if n == 0:
            name, length, rest = names[-2], 12_000_456, copy
        elif n % _COLLECTIVE_EVERY == 0:
            late = gpu * 777_000  # the GPUs come one after the other and end together
            name, at, length, rest = names[-1], at + late, 15_000_000 - late, context
        else:
            kernel = n * 7 % len(_KERNELS)
            name, length, rest = names[kernel], 8_000_123 + kernel * 20_000, fixed[kernel]
        yield name + _varint(at) + b"\x18" + _varint(length) + correlation + rest


def _host(gpu: int, count: int) -> Iterator[bytes]:
    device = _field(4, _stat("device_id", gpu))
    for i in range(count):
        call = 3 if i % _KERNELS_PER_STEP == 0 else 1
        yield (b"\x08" + _varint(call) + b"\x10" + _varint(i * _PACE_PS) + b"\x18" + _varint(4_321_000) + device
               + _field(4, _stat("correlation_id", gpu * count + i + 1)))


def _markers(count: int) -> Iterator[bytes]:
    length = _KERNELS_PER_STEP * _PACE_PS
    for step in range(count // _KERNELS_PER_STEP):
        yield (b"\x08\x04\x10" + _varint(step * length) + b"\x18" + _varint(length)
               + _field(4, _stat("step_num", step)) + _field(4, _stat("_r", 1)))


def _plane(file: BinaryIO, name: str, names: tuple[str, ...], lines: Iterator[bytes], stats: bytes = b"") -> None:
    """Append a plane; its lines wait in a temporary file until its length is known."""
    head = _field(2, name.encode()) + stats
    for number, texts in ((4, enumerate(names, 1)), (5, ((i, text) for text, i in _ID.items()))):
        for i, text in texts:
            key = b"\x08" + _varint(i)
            head += _field(number, key + _field(2, key + _field(2, text.encode())))
    with tempfile.TemporaryFile() as waiting:
        for line in lines:
            waiting.write(_head_of(3, len(line)) + line)
        file.write(_head_of(1, len(head) + waiting.tell()) + head)
        waiting.seek(0)
        while piece := waiting.read(1 << 20):
            file.write(piece)


def _line(name: str, number: int, timestamp_ns: int, events: Iterator[bytes]) -> bytes:
    out = bytearray(b"\x08" + _varint(number) + _field(2, name.encode()) + b"\x18" + _varint(timestamp_ns))
    for event in events:
        out += _field(4, event)
    return bytes(out)


def _stat(name: str, value: int) -> bytes:
    return b"\x08" + _varint(_ID[name]) + b"\x18" + _varint(value)  # uint64_value


def _reference(name: str, text: str) -> bytes:
    return b"\x08" + _varint(_ID[name]) + b"\x38" + _varint(_ID[text])  # ref_value


def _field(number: int, content: bytes) -> bytes:
    return _head_of(number, len(content)) + content


def _head_of(number: int, length: int) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(length)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
