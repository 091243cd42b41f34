"""The version, for whatever names it: the command line, documents, crash reports."""

__version__ = "0.2.0"
