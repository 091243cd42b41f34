"""The rules on the last minutes of telemetry, one module for each subject. Each rule is a record in
:mod:`gputop.advice.live_rules` and a pair of functions: ``judge_<id>`` takes the
:class:`~gputop.advice.live.node_view.NodeView` and returns a verdict, what is missing, or None where nothing is wrong;
``describe_<id>`` writes the words of the finding from the verdict.

They run every 2 s on up to 16 GPUs, so they ask the view, which computes each window once. Nothing here imports a
rule on traces or waits for hardware.
"""
