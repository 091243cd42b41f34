"""One module per command, imported when it is asked for; each has ``run(args)``, which returns the exit status."""
