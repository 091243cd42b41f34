"""A trace that can be drawn at any zoom, and its idle gaps.

Owns the file of a timeline (``layout``, written by ``build``, read by ``reader``), its rows, and the ranking of idle
gaps with what the host did in them. It draws nothing and knows no terminal; the trace itself is read by ``worker`` in
a process of its own, so that the reader of a timeline holds no event.
"""
