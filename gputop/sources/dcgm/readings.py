"""DCGM values to readings in the metrics' units."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import Reading
from gputop.sources.dcgm import fields
from gputop.sources.dcgm.fields import BY_METRIC, FieldValue
from gputop.sources.nvml.plausibility import plausible_reading

if TYPE_CHECKING:
    from gputop.sources.dcgm.engine_reader import EngineAnswer

_GPM_DRIVER = 520  # the first driver with GPM
WATCH_HINT = "start gputop with --dcgm-watch, or dcgm-exporter"


def dcgm_reading(snapshot: EngineAnswer, uuid: str, metric: str) -> Reading:
    """One metric of the GPU ``uuid`` from DCGM, or why it has none."""
    unit = GPU_METRICS[metric].unit
    if snapshot.error is not None:
        return Reading.missing(unit, snapshot.error, fields.SOURCE)
    of_gpu = snapshot.values.get(uuid)
    if of_gpu is None:
        reason = "not asked yet" if uuid in snapshot.listed else "the host engine does not list this GPU"
        return Reading.missing(unit, reason, fields.SOURCE)
    total = 0.0
    of_metric = BY_METRIC[metric]
    for field in of_metric:
        value = of_gpu.get(field.id)
        if value is None or value.value is None:
            return Reading.missing(unit, missing_reason(field.id, value), fields.SOURCE)
        total += value.value * field.factor
    source = snapshot.sources.get((uuid, of_metric[0].id), fields.SOURCE)
    return plausible_reading(metric, total, source, of_metric[0].coarse)


def missing_reason(field_id: int, value: FieldValue | None) -> str:
    """Reason why a field has no value, for a reading."""
    if value is None:
        return f"gputop has requested field {field_id}"
    if value.code == fields.NOT_WATCHED:
        hint = WATCH_HINT if fields.is_profiling(field_id) else "start dcgm-exporter or gputop --source dcgm"
        return f"no program watches field {field_id}: {hint}"
    return value.reason if value.reason.startswith("field ") else f"field {field_id}: {value.reason}"


def engine_name(snapshot: EngineAnswer) -> str:
    """The host engine's name for a header: "DCGM 4.2 host engine"."""
    version = ".".join(snapshot.version.split(".")[:2])
    return f"DCGM {version} host engine" if version else "DCGM host engine"


def reads_through_gpm(version: str, driver: str, capability: FieldValue | None) -> bool:
    """Return whether an engine reads a GPU's profiling fields through GPM: a watch of them takes no counters from
    anybody.

    So it does since DCGM 3.1 on Hopper and newer (compute capability 9), with a driver that has GPM (R520).
    """
    engine, release = re.match(r"(\d+)\.(\d+)", version), re.match(r"\d+", driver)
    if engine is None or release is None or capability is None or capability.value is None:
        return False
    return ((int(engine[1]), int(engine[2])) >= (3, 1) and int(release[0]) >= _GPM_DRIVER
            and 9 <= int(capability.value) >> 16 < 100)
