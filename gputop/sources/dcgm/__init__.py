"""GPUs through a DCGM host engine: alone, or as the fallback for what NVML lacks.

Never watches a profiling field without the user's consent, because its watch takes the GPU's counters.
"""
