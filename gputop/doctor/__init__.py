"""``gputop doctor``: checks what works on this node, and how to repair what does not.

Every check is a function of what it reads (a file tree, the driver's facts); it changes nothing on the node.
"""
