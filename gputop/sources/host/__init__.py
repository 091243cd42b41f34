"""The host beside the GPUs, from /proc, /sys and psutil: CPU, memory, disks, network, processes, control groups.

Reads only; every file may be missing, refused or changed by the process it belongs to.
"""
