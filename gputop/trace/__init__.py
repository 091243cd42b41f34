"""One model of a trace, whatever wrote it: its columns, how they are built, and sets of time.

Owns :class:`gputop.trace.model.Trace`, the arithmetic of intervals and nested events, and what the names of kernels
and threads mean. It knows no analysis, no finding and no screen, and never guesses: what a trace does not tell is
-1, None or "unknown". What the formats hold is described in docs/contributing/trace-notes.md.
"""
