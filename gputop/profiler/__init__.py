"""The profiler inside the job: finding it, having it record, storing the traces it delivers.

``xprof`` speaks with the profiler servers of TensorFlow and JAX (``messages``, ``probe``, ``client``).
Common to all ways to capture are the search for servers (``discovery``, ``sockets``, ``addresses``, ``workers``), a
recording's order and result (``recording``) and the files of a run (``storage``, ``stale_files``). The package knows no
session and no finding, and it never decodes a trace's events: ``trace`` does. How long a capture may be is decided in
``profiler.capture``.
"""
