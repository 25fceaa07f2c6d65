"""Low-precision parameters with float32 masters: `prepare`, the masters and their steps, and the way back.

``prepare`` decides by ``low_parameters``, ``params`` is the master tensor, ``hooks`` and ``steps`` are what a step of the
optimizer does with it, in one pass over the numbers where one is known (``single_pass``).
"""
