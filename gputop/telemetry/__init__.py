"""Samples over time: the sampler's clock and threads, the history in memory, the step period estimate.

Knows no kind of hardware (it reads a :class:`gputop.sources.base.Source`) and judges nothing (:mod:`gputop.advice`).
"""
