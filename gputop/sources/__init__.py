"""Hardware to samples: every way to read a node satisfies :class:`gputop.sources.base.Source`.

A source keeps no history and starts no clock: :mod:`gputop.telemetry` does. A value that cannot be read is
a reading with a reason, never 0.
"""
