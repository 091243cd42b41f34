"""Captures of a session: whose job, its servers, how one is taken, and those of earlier runs."""
