"""The GPUs of this node through NVML, with GPM where the GPU has it, and their MIG instances.

Every call into the driver may hang, so no module here is called from the interface's thread.
"""
