"""State of what is watched now, for any view: samples, profiler servers, captures, findings.

Owns every thread that touches hardware, sockets or files, and the order in which things happen to a session. It never
knows a widget or a terminal: views read the attributes of a :class:`~gputop.session.session.Session`, ask it for
actions and listen to it. It computes no finding of its own: ``advice`` does.
"""
