"""Recordings and snapshots: written, read again, and played into a session in place of a source.

Owns the recording's format and the reader of snapshot documents. Both must stay readable: ``tests/data`` holds files
of earlier versions. A file may come from anywhere, so everything in it is checked before an object is built from it.
It never samples hardware, and never talks to a job.
"""
