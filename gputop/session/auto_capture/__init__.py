"""Captures that gputop starts by itself when a GPU dips: the rule, the detector, the controller, the bounded folder.

It knows of its host only what :class:`~gputop.session.auto_capture.controller.CaptureHost` names, never the session.
It never captures more often than it was allowed to, and removes only run folders that it made.
"""
