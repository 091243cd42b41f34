"""Captures from PyTorch jobs: the way of kineto's daemon mode, over a UNIX socket of datagrams.

protocol  datagrams and configs, pure
clients   which process of this machine listens to a daemon, by the kernel's tables
folder    the folder of the socket, in the job's root
daemon    answers the clients' polls during a capture
record    probe, plan, recording and trace files
The process of a job that was not prepared is made a client by :mod:`gputop.launch.serve`.
"""
