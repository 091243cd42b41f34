"""A training job that does not exist: a seeded simulation of a data-parallel training loop on
eight GPUs. Live figures, captures and the truth to test analyses against all follow from the
same operations, so what gputop finds in a demo it finds for the reason the scenario states.

Everything that comes out of here is marked simulated.
"""

from __future__ import annotations
