"""XSpaces of TensorFlow and JAX: ``wire`` decodes protobuf, ``xplane`` a plane and its events, ``stats`` their columns,
``reader`` makes the Trace. ``wire`` knows no schema; nothing here needs the protobuf package.
"""
