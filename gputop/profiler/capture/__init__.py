"""A capture that does not hurt the job: how long it may be, what it may cost, of one worker or of several.

Owns the probe and the plan made of it, the guard over the job's memory, and the record of a finished capture. It never
starts a capture by itself and never analyzes a trace beyond counting its events and finding its steps.
"""
