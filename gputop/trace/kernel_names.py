"""Classification of a device event by its name: kernel, collective or copy, number type, tensor cores.

The tensor-core test was checked by eye on 514 real kernel names of cuBLAS, cuDNN, CUTLASS,
XLA and flash attention; a name that says nothing gives "unknown" and None, never a guess
(docs/contributing/trace-notes.md, "Device events by name").
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import NamedTuple

from gputop.trace.model import Kind, MemoryKind
from gputop.trace.occupancy import LaunchShape, theoretical_occupancy

UNKNOWN = "unknown"


class Class(NamedTuple):
    """``dtype``: fp64, fp32, tf32, bf16, fp16, fp8, int8 or "unknown".

    ``tensor_core``: whether a matrix kernel runs on tensor cores; None where the name does
    not show it, as for element-wise kernels, collectives and copies.
    """

    kind: Kind
    dtype: str = UNKNOWN
    tensor_core: bool | None = None


# Exact names of copies: CUPTI by way of TF and XLA, ROCm's tracer.
_COPIES = {
    "MemcpyH2D": Kind.H2D, "MemcpyD2H": Kind.D2H, "MemcpyD2D": Kind.D2D, "MemcpyP2P": Kind.P2P,
    "MemcpyOther": Kind.COPY_OTHER, "Memset": Kind.MEMSET,
    "CopyHostToDevice": Kind.H2D, "CopyDeviceToHost": Kind.D2H, "CopyDeviceToDevice": Kind.D2D,
    "CopyPeerToPeer": Kind.P2P, "FillBuffer": Kind.MEMSET,
}
# Kineto, Nsight Systems, TensorFlow 1 and own tools on CUPTI: "Memcpy HtoD (Pageable -> Device)", "[CUDA memcpy
# Device-to-Host]", "MEMCPYHtoD", "[MEMCPY] HtoD".
_SPELLED_COPY = re.compile(r"\[?(?:CUDA )?mem(?P<what>cpy|set)(?:\b\]?[ ]?|(?=[HDP]to[HDP]\b))"
                           r"(?P<way>HtoD|DtoH|DtoD|PtoP|Host-to-Device|Device-to-Host|Device-to-Device|Peer-to-Peer)?",
                           re.IGNORECASE)
_WAYS = {"htod": Kind.H2D, "dtoh": Kind.D2H, "dtod": Kind.D2D, "ptop": Kind.P2P, "host-to-device": Kind.H2D,
         "device-to-host": Kind.D2H, "device-to-device": Kind.D2D, "peer-to-peer": Kind.P2P}
_ROCM_COPY = re.compile(r"__amd_rocclr_(copy|fill)(Buffer|Image)", re.IGNORECASE)
# NCCL (ncclSymkDevKernel_… are its kernels on symmetric memory) and RCCL, MSCCL and MSCCL++, NVSHMEM; kernels of the
# frameworks' own that exchange data over peer memory: multimem and symmetric memory in PyTorch, one- and two-shot
# AllReduces in PyTorch, XLA and TensorRT-LLM, vLLM's cross_device_reduce; libraries for expert parallelism: DeepEP and
# what is built like it (a namespace that ends in ep, as dpsk::ep and hybrid_ep, with dispatch, combine and the barriers
# before them), AMD's MORI, Perplexity's, TensorRT-LLM's and FlashInfer's, Triton-distributed's. Their kernels that only
# count, check or pack on the GPU itself (get_dispatch_layout, moeA2APrepareDispatch) exchange nothing.
_EXPERT_EXCHANGE = r"(?!get_dispatch_layout)\w{0,40}(?:dispatch|combine|cached_notify|barrier|clean_low_latency)"
_COLLECTIVE = re.compile(
    r"nccl|rccl|msccl|nvshmem|multimem_\w|symm(?:etric)?_mem(?:ory)?::"
    r"|(?:one|two)_?shot_?(?:all_?reduce|all_?gather|reduce_?scatter)|(?<![a-z])all_?reduce_?(?:fusion_?)?kernel"
    rf"|cross_device_reduce|(?<!\w)(?:\w{{1,20}}_)?ep::(?:\w{{1,40}}::){{0,4}}{_EXPERT_EXCHANGE}"
    rf"|(?:inter|intra)node(?:_ll)?::{_EXPERT_EXCHANGE}|mori::moe::Ep(?:Dispatch|Combine)"
    r"|pplx::\w{0,40}All_?To_?All|moe_?all_?to_?all|moe_?a2a(?!prepare|sanitize)|fused_?moe_?comm"
    r"|(?<![a-z])a2a_(?:dispatch|combine)_(?:send|recv)|kernel_(?:dispatch|combine)_token", re.IGNORECASE)

# Convolutions by FFT multiply complex numbers (on tensor cores: c1688cgemm); cuDNN's first engines for gradients.
_FFMA = re.compile(r"_ffma_|sgemm|dgemm|(?<!\d)cgemm|scudnn|winograd|simt|cudnn::\w+::[dw]grad\w*_(?:engine|alg\d)",
                   re.IGNORECASE)
_TENSOR_CORE = re.compile(
    r"hmma|imma|gmma|h884|s884|h1688|s1688|c1688|16816|16832|8816|tensorop|nvjet|flash_(fwd|bwd)|fmha|xmma_"
    r"|_(bf16|f16|fp16|tf32|e4m3|e5m2)", re.IGNORECASE)
# Tried in this order: the type of the operands is wanted, and names often contain the accumulator's type, too.
_DTYPES = tuple((dtype, re.compile(pattern, re.IGNORECASE)) for dtype, pattern in (
    ("fp8", r"e4m3|e5m2|float8|fp8"),
    ("tf32", r"tf32|tensorop_s1688"),
    ("bf16", r"bf16|bfloat16|nvjet_tst"),
    ("fp16", r"f16|fp16|h884|h1688|h16816|\bhalf(?:_t)?\b|__half|c10::Half|Eigen::half|nvjet_hsh|hgemm|DT_HALF"),
    ("int8", r"imma|i8816|i16832|\bint8|(?<!un)signed char"),
    ("fp64", r"dgemm|_f64|\bdouble\b|d884|DT_DOUBLE"),
    ("fp32", r"[sc]gemm|scudnn|_ffma_|_f32|\bfloat\b|DT_FLOAT")))

# An optimizer's kernel over many tensors takes its hyper-parameters in FP64, and one that draws random numbers their
# bounds, whatever the tensors' type is.
_HYPER_PARAMETERS = re.compile(r", double(?![\w*])")
_WITH_HYPER_PARAMETERS = re.compile(r"multi_tensor_apply|at::native::.*distribution_")

_SIZE = re.compile(r"\b(?:size|num_bytes):(\d{1,18})\b")
_END = re.compile(r"\bkind_(src|dst):(\w+)")
_DETAIL = re.compile(r"\b(regs|static_shared|dynamic_shared|group_mem|grid|block|occ_pct):([\d.,]{1,40})")
_DETAIL_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_REPLICA = re.compile(r"(^|/)replica_\d+/")
_OP = re.compile(r"[^:]+:[A-Za-z_]\w*")
_NUMBERING = re.compile(r"([._]\d+)+$")
_KINETO_SHARED = 48 << 10  # kineto writes an occupancy of 0 for kernels with more shared memory
_KINETO_BYTES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2, "char": 1,
                 "byte": 1, "bool": 1}
_MEMORY = {"pageable": MemoryKind.PAGEABLE, "pinned": MemoryKind.PINNED, "device": MemoryKind.DEVICE,
           "managed": MemoryKind.MANAGED, "array": MemoryKind.ARRAY}


@lru_cache(maxsize=65536)
def classify(name: str) -> Class:
    """Classify the device event of this name. Never fails: an unknown name is a COMPUTE kernel."""
    if name in _COPIES:
        return Class(_COPIES[name])
    rocm = _ROCM_COPY.match(name)
    if rocm:
        return Class(Kind.MEMSET if rocm[1].lower() == "fill" else Kind.COPY_OTHER)
    spelled = _SPELLED_COPY.match(name)
    if spelled:
        if spelled["what"].lower() == "set":
            return Class(Kind.MEMSET)
        return Class(_WAYS.get((spelled["way"] or "").lower(), Kind.COPY_OTHER))
    if _COLLECTIVE.search(name):
        return Class(Kind.COLLECTIVE)
    typed = _HYPER_PARAMETERS.sub("", name) if _WITH_HYPER_PARAMETERS.search(name) else name
    dtype = next((dtype for dtype, pattern in _DTYPES if pattern.search(typed)), UNKNOWN)
    tensor_core = False if _FFMA.search(name) else True if _TENSOR_CORE.search(name) else None
    return Class(Kind.COMPUTE, dtype, tensor_core)


_OF_TEMPLATE = re.compile(r"void [\w:() ]+<.*>\(")


def only_on_gpu(name: str) -> bool:
    """Return whether the name is surely that of a device event, whatever row it is on."""
    spelled = _SPELLED_COPY.match(name)
    return name in _COPIES or bool(_OF_TEMPLATE.match(name) or (spelled and spelled["way"]))


def copy_way(api_call: str) -> Kind | None:
    """The direction that a host call such as ``cuMemcpyHtoDAsync_v2`` or ``hipMemcpyDtoDAsync`` names."""
    for way in ("HtoD", "DtoH", "DtoD"):
        if "emcpy" + way in api_call:
            return _WAYS[way.lower()]
    return None


class CopyDetails(NamedTuple):
    """Bytes (-1: unknown) and the kind of memory at both ends of a copy."""

    bytes: int = -1
    src: MemoryKind = MemoryKind.UNKNOWN
    dst: MemoryKind = MemoryKind.UNKNOWN


@lru_cache(maxsize=65536)
def copy_details(text: str) -> CopyDetails:
    """Parse ``kind_src:pinned kind_dst:device size:4096 dest:0 async:1``, or the older ``num_bytes:4096``.

    ROCm writes a size of 0 for an unknown one.
    """
    size = _SIZE.search(text)
    ends = {m[1]: memory_kind(m[2]) for m in _END.finditer(text)}
    return CopyDetails((int(size[1]) or -1) if size else -1, ends.get("src", MemoryKind.UNKNOWN),
                       ends.get("dst", MemoryKind.UNKNOWN))


def memory_kind(text: str) -> MemoryKind:
    """CUPTI's name for a kind of memory, in any case; ``Device Static`` is device memory."""
    words = text.lower().split()
    return _MEMORY.get(words[0], MemoryKind.UNKNOWN) if words else MemoryKind.UNKNOWN


@lru_cache(maxsize=65536)
def launch_shape(text: str, nvidia: tuple[int, int] | None = None) -> LaunchShape | None:
    """Parse ``regs:32 static_shared:0 dynamic_shared:0 grid:64,1,1 block:256,1,1 occ_pct:100``; None without a shape.

    ROCm writes ``group_mem`` for shared memory. An occupancy of 0 means unknown: ROCm always
    writes 0, XLA does for kernels with more than 48 KiB of shared memory. Given the compute capability of an
    NVIDIA GPU it is computed from the rest.
    """
    details = dict(_DETAIL.findall(text))
    grid, block = (dimensions(details.get(key, "").split(",")) for key in ("grid", "block"))
    if grid is None or block is None:
        return None
    number = {key: float(value) for key, value in details.items() if _DETAIL_NUMBER.fullmatch(value)}
    shared = [int(number[key]) for key in ("static_shared", "dynamic_shared", "group_mem") if key in number]
    occupancy = number.get("occ_pct", 0.0) / 100
    registers, bytes_ = int(number.get("regs", -1)), sum(shared) if shared else -1
    return LaunchShape(grid, block, registers, bytes_, occupancy if 0 < occupancy <= 1 else theoretical_occupancy(
        nvidia, math.prod(block), registers, bytes_))


def dimensions(values: object) -> tuple[int, int, int] | None:
    """Three positive numbers, from integers or their text; None where it is anything else."""
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        return None
    x, y, z = (int(v) if isinstance(v, str) and re.fullmatch(r"[0-9]{1,10}", v) else v for v in values)
    sound = all(isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 32 for v in (x, y, z))
    return (x, y, z) if sound else None


def kineto_shape(grid: tuple[int, int, int] | None, block: tuple[int, int, int] | None, registers: int, shared: int,
                 percent: float | None) -> LaunchShape | None:
    """The launch shape in a Chrome event's arguments, as kineto writes them."""
    grid, block = dimensions(grid), dimensions(block)
    if grid is None or block is None:
        return None
    registers, shared = (n if 0 <= n < 1 << 32 else -1 for n in (registers, shared))
    occupancy = percent / 100 if percent is not None and 0 <= percent <= 100 else None
    return LaunchShape(grid, block, registers, shared, occupancy if occupancy or shared <= _KINETO_SHARED else None)


def kineto_message_bytes(dtype: object, *elements: object) -> int:
    """Bytes of a collective's larger side (gathered output, scattered input) on one rank; -1: unknown."""
    size = _KINETO_BYTES.get(str(dtype).lower())
    largest = max((n for n in elements if isinstance(n, int)), default=-1)
    return largest * size if size is not None and 0 < largest < 1 << 50 else -1


@lru_cache(maxsize=65536)
def op_of_annotation(text: str) -> str:
    """``scope/op:Type`` at the beginning of the annotation with which older TensorFlow names a kernel's op, "" where it
    names none. What follows a "#" are its details, "::" begins an inner annotation."""
    op = text.split("#", 1)[0]
    return op if _OP.fullmatch(op) else ""


@lru_cache(maxsize=65536)
def split_op(text: str) -> tuple[str, str]:
    """Name and type of ``scope/op:Type``. Without a type it is the op's last name less its numbering (XLA, JAX)."""
    name, _, kind = text.rpartition(":") if ":" in text else (text, "", "")
    name = _REPLICA.sub(r"\1", name)
    last = name.rsplit("/", 1)[-1]
    return name or UNKNOWN, kind or _NUMBERING.sub("", last) or UNKNOWN


_SHORT_FROM = 4_000  # characters of a name that are looked at
_LENGTH = re.compile(r"[KVRrO]*(\d{1,4})")
_SUBSTITUTION = re.compile(r"S[0-9A-Z]*_")  # of a name that stood before
_WRAPPERS = ("Kernel", "Kernel2", "device_kernel", "kentry")  # as in _SAYS_NOTHING
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
# Wrappers whose name is the same for all kernels: what they run is their first template argument.
_SAYS_NOTHING = re.compile(r"(?:cutlass\w*|ck_tile)::(?:\w+::)*(?:Kernel2?|device_kernel|kentry)<([^<>(),]+)")


@lru_cache(maxsize=16_384)
def short_kernel(name: str) -> str:
    """A kernel's name without its return type, template arguments and parameters:
    "at::native::elementwise_kernel<…>". A mangled name (Itanium C++ ABI, 5.1) is read as far as its identifiers go."""
    if name.startswith("_Z"):
        return _demangled(name) or name
    if (named := _SAYS_NOTHING.search(name)) is not None:
        return named[1]
    name = _ANONYMOUS.sub("", name.removeprefix("void "))
    out, depth = [], 0
    for char in name[:_SHORT_FROM]:
        if char == "(" and not depth:
            break
        if char == "<":
            if not depth:
                out.append("<…>")
            depth += 1
        elif char == ">" and depth:
            depth -= 1
        elif not depth:
            out.append(char)
    return "".join(out).strip() or name


def _demangled(name: str) -> str:
    parts, end = _identifiers(name, 2)
    arguments = name[end:end + 1] == "I"
    if arguments and parts[-1:] and parts[-1] in _WRAPPERS and (argument := _identifiers(name, end + 1))[0]:
        parts, end = argument
        arguments = name[end:end + 1] == "I"
    parts = [part for part in parts if not part.startswith("_GLOBAL__N_")]
    return "::".join(parts) + ("<…>" if parts and arguments else "")


def _identifiers(name: str, pos: int) -> tuple[list[str], int]:
    """Identifiers of a mangled name from a position on, and where they end."""
    parts = list[str]()
    nested = name[pos:pos + 1] == "N"
    pos += nested
    if nested and (substitution := _SUBSTITUTION.match(name, pos)) is not None:
        pos = substitution.end()
    while (length := _LENGTH.match(name, pos)) is not None and len(parts) < 20:
        pos = length.end() + int(length[1])
        parts.append(name[length.end():pos])
        if not nested:
            break
    return parts, pos
