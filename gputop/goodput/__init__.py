"""Use of the GPUs' time over hours and days, from recordings alone.

The definitions are in docs/reference/report.md. Pure, but for :mod:`gputop.goodput.recorded`, which reads the files.
One pass over the samples, in memory that does not grow with their number.
"""
