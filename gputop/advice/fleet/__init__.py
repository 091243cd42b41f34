"""Rules about the jobs of a cluster: GPUs that are held and not used, and GPUs that hold up their job."""
