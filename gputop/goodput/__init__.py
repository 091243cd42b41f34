"""What became of the GPUs' time over hours and days, from recordings alone. docs/reference/report.md has the definitions.

Pure, but for :mod:`gputop.goodput.recorded`, which reads the files. One pass over the samples, in memory that does not
grow with their number.
"""
