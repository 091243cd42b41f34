"""The folder that Python searches first in gputop's own processes: it holds one file, which imports by full names."""
