"""The screen of ``gputop cluster``: jobs that unfold to their nodes and GPUs."""
