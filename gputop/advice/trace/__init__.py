"""The rules on traces, one module for each subject. Each rule is a pair of functions: ``judge_<id>`` computes its
verdict from :class:`~gputop.advice.trace.facts.TraceFacts`, ``describe_<id>`` writes its words.

Nothing here reads a file or imports a live rule.
"""
