"""Write ``src/mezzo/tables/torch/ops.csv``: every aten op of the installed PyTorch, with the facts a policy needs.

The catalog lets the core check op names without PyTorch. Run it after moving the pin in ``constraints.txt``:

    python scripts/generate_catalog.py
"""

from __future__ import annotations

import csv
from pathlib import Path

from mezzo.torch.ops import installed_catalog

TARGET = Path(__file__).parent.parent / "src" / "mezzo" / "tables" / "torch" / "ops.csv"


def main() -> None:
    """Write the catalog of the installed PyTorch."""
    with TARGET.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["op", "traits"])
        writer.writerows((op, " ".join(traits)) for op, traits in sorted(installed_catalog().items()))


if __name__ == "__main__":
    main()
