"""Code that runs inside the job's own processes: only the standard library, Python 3.8 and newer, nothing of gputop."""
