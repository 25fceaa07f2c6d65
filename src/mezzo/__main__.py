"""``python -m mezzo``: the same as the ``mezzo`` command."""

from mezzo.cli import main

main()
