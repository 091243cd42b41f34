"""Files into a Trace: one module or folder for each format, and one row for each in ``registry``.

``load`` is the way in. A reader turns bytes into the model's columns and says in quality notes what the capture lacks;
it never trusts a length, never raises for damage as long as anything can be read, and computes no figure.
"""
