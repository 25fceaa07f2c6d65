"""For scripts written for NVIDIA's Apex: `mezzo.apex.amp` in the place of the removed `apex.amp`.

Change ``from apex import amp`` into ``from mezzo.apex import amp``, or leave the script as it is and run it with
``python -m mezzo.apex script.py``. docs/from-apex.md goes through it level by level and call by call.
"""
