"""XProf's way: the profiler server of TensorFlow and JAX over gRPC, and the XSpace that it hands over."""
