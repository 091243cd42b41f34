"""Telemetry in a file: ``format`` and ``decode`` (samples to bytes and back), ``writer``, ``reader``."""
