"""The vocabulary of all packages: metrics, samples, findings, Xid codes, errors.

Values only. Imports nothing else of gputop; reads no hardware and draws nothing.
"""
