"""The names of GPUs, short enough for a header line."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from gputop.core.samples import NodeSample
from gputop.text.units import printable

_LEFT_OUT = ("NVIDIA", "Tesla", "GeForce", "Quadro")


@lru_cache(64)
def short_gpu_name(name: str) -> str:
    """"NVIDIA H100 80GB HBM3" → "H100 80GB": the maker and the memory technology do not tell GPUs apart."""
    words = [w for w in name.split() if w not in _LEFT_OUT and not w.startswith("HBM")]
    return printable(" ".join(words)) or printable(name)


def gpu_kinds(sample: NodeSample) -> str:
    """"8×H100 80GB": the GPUs counted by name. A MIG instance of a GPU that is listed itself is not counted.

    Empty without a GPU.
    """
    whole = {g.info.index for g in sample.gpus if g.info.mig is None}
    kinds = Counter(short_gpu_name(g.info.name) for g in sample.gpus if g.info.mig is None or g.info.index not in whole)
    return " + ".join(f"{n}×{name}" for name, n in kinds.items())
