"""The rules on traces, one module for each subject. Each rule is a record in :mod:`gputop.advice.trace_rules` and a
pair of functions: ``judge_<id>`` takes :class:`~gputop.advice.trace.facts.TraceFacts` and returns a verdict, what is
missing, or None where nothing is wrong; ``describe_<id>`` writes the words of the finding from the verdict and the job.

Nothing here reads a file or imports a live rule.
"""
