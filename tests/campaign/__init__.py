"""Campaigns that run for minutes or hours: hostile input (``make fuzz``), and gputop's own growth (``make soak``)."""
