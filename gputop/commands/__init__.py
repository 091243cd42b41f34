"""The commands, one file each: options (``add_arguments``) and what it does (``run``, which returns the exit status).

A file is imported only where the command line names its command. Commands print and read the terminal; other packages
compute what they show.
"""
