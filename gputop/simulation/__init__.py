"""Simulated training jobs: what ``--demo`` shows, and what the tests analyze.

There is one simulator. :mod:`job` holds a job's parameters, :mod:`program` the kernels of its step;
:mod:`timeline` computes what runs when, on the host and on each GPU; :mod:`host_events` and :mod:`xspace`
record that as TensorFlow's or JAX' profiler would (:mod:`encode` writes the protobuf). For the demo,
:mod:`scenarios` names the jobs, :mod:`loop` runs one without end, :mod:`figures` and :mod:`node` derive
live readings from the same operations, and :mod:`server` is the job's profiler server. What gputop finds
therefore follows from the cause that was put into the job.

Everything that the demo shows or writes is marked simulated. This package knows no rule and no analysis.
"""

from __future__ import annotations
