"""The rules on the last minutes of telemetry, one module for each subject. Each rule is a pair of functions:
``judge_<id>`` computes its verdict from :class:`~gputop.advice.live.node_view.NodeView`, ``describe_<id>`` writes its
words.

They run every 2 s on up to 16 GPUs, so they ask the view, which computes each window once. Nothing here imports a
rule on traces or waits for hardware.
"""
