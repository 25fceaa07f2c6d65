"""``python -m mezzo.apex script.py``: run a script that was written for Apex, as it is."""

import sys

from mezzo.apex.runner import main

sys.exit(main(sys.argv[1:]))
