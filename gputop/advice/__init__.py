"""The adviser: from an analysis of a trace, or from the history of the node, to findings.

It owns what a rule is (``rule``), the records of all rules (``trace_rules``, ``live_rules``, joined by ``registry``),
what a fix would save (``savings``), what follows from what (``causes``), and how the findings of a trace and of the
live figures become one list (``merge``). Rules are pure: no clock, no file, no hardware, no thread. A rule computes
no analysis of its own that another view could need: that belongs to :mod:`gputop.analysis`. No rule knows a screen.
"""
