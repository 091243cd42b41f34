"""Many nodes: what a Prometheus knows of their GPUs, what Slurm knows of their jobs, and both joined to a fleet.

Nothing here runs on the nodes. What is asked is bounded: aggregates by job or node for all, single GPUs only where
they differ from their peers or are on the screen. The monitor imports none of it.
"""
