"""The language of rules of one's own: expressions over documented names, checked when they are read.

It knows the names and their units, never where their values come from: :mod:`gputop.advice.user_rules` reads those. An
expression has numbers, units, comparisons and a few functions, and nothing that could call out. Its length, its depth
and what it looks back on are bounded.
"""
