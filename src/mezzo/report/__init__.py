"""What happened to each op: records, their sums, findings, as a table of text, as data and as one HTML page.

No framework and no terminal library: `mezzo.torch.explain` and `mezzo.jax.explain` fill a report in, and other adapters can.

Example:
    >>> from mezzo.report import OpRecord, Region, Report
    >>> mean = OpRecord("mean", "fp32")
    >>> Report("loss", "jax", (Region("loss", {"dtype": "bfloat16"}, (mean,)),)).records[0].rule
    'fp32'
"""

from .findings import Finding, Residuals
from .modules import ModuleTotals
from .ops import DtypeTotals, OpTotals
from .records import Cast, OpRecord, SourceLine
from .regions import Region
from .report import Report
from .totals import DotCount, Totals

__all__ = [
    "Cast",
    "DotCount",
    "DtypeTotals",
    "Finding",
    "ModuleTotals",
    "OpRecord",
    "OpTotals",
    "Region",
    "Report",
    "Residuals",
    "SourceLine",
    "Totals",
]
