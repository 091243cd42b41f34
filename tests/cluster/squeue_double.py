"""A squeue that prints what it is given."""

from __future__ import annotations

import json
from pathlib import Path

SAID = Path(__file__).parents[1] / "data" / "slurm" / "squeue.json"


def squeue(**fields: object) -> bytes:
    job = {"job_id": 7, "job_state": "RUNNING", "name": "train", "user_name": "ada", "nodes": "n[1-2]",
           "gres_detail": ["gpu:h100:8(IDX:0-7)"] * 2, "start_time": 100}
    return json.dumps({"jobs": [{**job, **fields}]}).encode()
