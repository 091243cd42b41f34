"""The ranks of a job as they tell of themselves: NCCL's RAS, PyTorch's flight recorder, the stacks of their threads.

Nothing here touches hardware or a screen. All of it may block, for a time that is known before.
"""
