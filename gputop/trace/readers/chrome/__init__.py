"""Chrome trace JSON of kineto, TensorBoard and JAX: ``json_stream`` reads the text piece by piece, ``events`` makes
columns of one file, ``reader`` the Trace of all ranks. Never holds a file's whole text.
"""
