"""Jobs with a profiler server inside: started by ``gputop run``, or asked for it while running by ``gputop attach``.

Must never disturb the job: whatever fails here, the job goes on as without gputop.
"""
