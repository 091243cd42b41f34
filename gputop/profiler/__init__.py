"""The profiler server inside the job: finding it, talking to it over gRPC, storing the traces it delivers.

Owns the wire (``messages``, ``probe``, ``client``), the search for servers (``discovery``, ``sockets``, ``workers``)
and the files of a run (``storage``, ``stale_files``). It knows no session and no finding, and it never decodes a
trace's events: ``trace`` does. How long a capture may be is decided in ``profiler.capture``.
"""
