"""How the scale moves, as data: verdicts and the scales that follow them, the same for every framework.

The scales are written out, not computed: those that are no powers of two are what PyTorch's own kernel gave.
"""

from __future__ import annotations

from dataclasses import dataclass

from mezzo import LossScaling, ScaleState, Verdict

__all__ = ["SEQUENCES", "ScaleSequence"]

LAST_POWER = 2.0**127
LARGEST = 3.4028234663852886e38
SMALLEST_NORMAL = 2.0**-126
VERDICTS = {"F": Verdict.FINITE, "I": Verdict.INF, "N": Verdict.NAN}


@dataclass(frozen=True)
class ScaleSequence:
    """One run.

    Attributes:
        name: The test id.
        why: What it is there for.
        numbers: The numbers of the run.
        found: One letter for each iteration: Finite, Inf (perhaps with NaN), NaN (without Inf).
        reached: Scale and growth tracker after each iteration.
        start: The state that a checkpoint left; None starts afresh.
        as_pytorch: Whether ``torch.amp.GradScaler`` with the same numbers, where it has them, moves in the same way.
    """

    name: str
    why: str
    numbers: LossScaling
    found: str
    reached: tuple[tuple[float, int], ...]
    start: ScaleState | None = None
    as_pytorch: bool = True

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts that the letters stand for."""
        return [VERDICTS[letter] for letter in self.found]


def still(*scales: float) -> tuple[tuple[float, int], ...]:
    """Give each scale with a tracker of zero."""
    return tuple((scale, 0) for scale in scales)


ORDINARY = [
    ScaleSequence(
        "defaults",
        "The numbers that almost every run has: three skips while the scale is found, then quiet.",
        LossScaling(),
        "IIIFFF",
        ((2.0**15, 0), (2.0**14, 0), (2.0**13, 0), (2.0**13, 1), (2.0**13, 2), (2.0**13, 3)),
    ),
    ScaleSequence(
        "growth",
        "So many finite iterations in a row, not in all, make the scale grow; the tracker starts again.",
        LossScaling(init_scale=1024.0, growth_interval=3),
        "FFIFFFFFF",
        (
            *((1024.0, 1), (1024.0, 2), (512.0, 0)),
            *((512.0, 1), (512.0, 2), (1024.0, 0)),
            *((1024.0, 1), (1024.0, 2), (2048.0, 0)),
        ),
    ),
    ScaleSequence(
        "interval of one",
        "Each finite iteration grows; the tracker is never seen above zero.",
        LossScaling(init_scale=4.0, growth_interval=1),
        "FFIFF",
        still(8.0, 16.0, 8.0, 16.0, 32.0),
    ),
    ScaleSequence(
        "below one",
        "Models whose gradients overflow float16 by themselves need a scale under one.",
        LossScaling(init_scale=2.0, growth_interval=2),
        "IIIFF",
        (*still(1.0, 0.5, 0.25), (0.25, 1), (0.5, 0)),
    ),
    ScaleSequence(
        "asymmetric powers of two",
        "Growth and backoff are separate numbers.",
        LossScaling(init_scale=64.0, growth_factor=4.0, backoff_factor=0.125, growth_interval=1),
        "FIFI",
        still(256.0, 32.0, 128.0, 16.0),
    ),
    ScaleSequence(
        "no powers of two",
        "Factors act in double, the result is rounded to float32: 700 * 0.7 is 490, not 489.99999999999994.",
        LossScaling(init_scale=1000.0, growth_factor=3.0, backoff_factor=0.7, growth_interval=2),
        "FFIFFIIFF",
        ((1000.0, 1), *still(3000.0, 2100.0), (2100.0, 1), *still(6300.0, 4410.0, 3087.0), (3087.0, 1), (9261.0, 0)),
    ),
    ScaleSequence(
        "backoffs that need rounding",
        "From the fourth on the product has more digits than a float32.",
        LossScaling(init_scale=1000.0, backoff_factor=0.7),
        "IIIII",
        still(700.0, 490.0, 343.0, 240.10000610351562, 168.07000732421875),
    ),
    ScaleSequence(
        "a first scale that float32 lacks",
        "0.1 is rounded before anything is multiplied with it.",
        LossScaling(init_scale=0.1, growth_factor=1.1, backoff_factor=0.9, growth_interval=1),
        "FFIIF",
        still(0.10999999940395355, 0.12099999934434891, 0.10889999568462372, 0.09800999611616135, 0.10781099647283554),
    ),
    ScaleSequence(
        "factors near one",
        "Small moves are not lost to rounding.",
        LossScaling(growth_factor=1.001, backoff_factor=0.99, growth_interval=1),
        "FFFFI",
        still(65601.5390625, 65667.140625, 65732.8046875, 65798.5390625, 65140.5546875),
    ),
    ScaleSequence(
        "to the last finite value",
        "Without a ceiling the scale stops where one more growth would be infinite, and can come down from there.",
        LossScaling(init_scale=2.0**125, growth_interval=1),
        "FFFFI",
        still(2.0**126, LAST_POWER, LAST_POWER, LAST_POWER, 2.0**126),
    ),
    ScaleSequence(
        "to the last finite value, waiting",
        "Each growth that is left out starts the tracker again.",
        LossScaling(init_scale=LAST_POWER, growth_interval=2),
        "FFF",
        ((LAST_POWER, 1), (LAST_POWER, 0), (LAST_POWER, 1)),
    ),
    ScaleSequence(
        "checkpoint",
        "A run goes on from the scale and the tracker it was saved with.",
        LossScaling(growth_interval=10),
        "FFI",
        ((512.0, 9), (1024.0, 0), (512.0, 0)),
        ScaleState(512.0, growth_tracker=8),
    ),
]

BOUNDS = [
    ScaleSequence(
        "default floor",
        "PyTorch's scale goes on to 0, and a scale of 0 puts infinities into the weights.",
        LossScaling(init_scale=2.0**-22),
        "IIIIF",
        (*still(2.0**-23, 2.0**-24, 2.0**-24, 2.0**-24), (2.0**-24, 1)),
        as_pytorch=False,
    ),
    ScaleSequence(
        "floor between two steps",
        "The scale stops on the floor itself, not on the last value above it, and grows from there.",
        LossScaling(init_scale=1000.0, backoff_factor=0.5, growth_interval=1, min_scale=300.0),
        "IIIF",
        still(500.0, 300.0, 300.0, 600.0),
        as_pytorch=False,
    ),
    ScaleSequence(
        "floor that float32 lacks",
        "A floor of 0.7 is the float32 nearest to it.",
        LossScaling(init_scale=1.0, min_scale=0.7),
        "II",
        still(0.699999988079071, 0.699999988079071),
        as_pytorch=False,
    ),
    ScaleSequence(
        "lowest floor",
        "The smallest normal float32 is the last scale whose inverse is finite, whatever the factor.",
        LossScaling(init_scale=2.0**-124, backoff_factor=0.25, min_scale=SMALLEST_NORMAL),
        "IIN",
        still(SMALLEST_NORMAL, SMALLEST_NORMAL, SMALLEST_NORMAL),
        as_pytorch=False,
    ),
    ScaleSequence(
        "start below the floor",
        "The floor stops backing off and does not lift a scale that someone chose; growth passes it.",
        LossScaling(init_scale=0.25, growth_interval=2, min_scale=1.0),
        "IFFFFFFI",
        (*still(0.25), (0.25, 1), *still(0.5), (0.5, 1), *still(1.0), (1.0, 1), *still(2.0, 1.0)),
        as_pytorch=False,
    ),
    ScaleSequence(
        "ceiling",
        "Growth stops on the ceiling itself; the tracker still starts again.",
        LossScaling(init_scale=1024.0, growth_interval=1, max_scale=5000.0),
        "FFFFIF",
        still(2048.0, 4096.0, 5000.0, 5000.0, 2500.0, 5000.0),
        as_pytorch=False,
    ),
    ScaleSequence(
        "start above the ceiling",
        "The ceiling stops growth and does not pull down a scale that someone chose.",
        LossScaling(init_scale=2.0**16, growth_interval=1, max_scale=2.0**15),
        "FFIFIFF",
        still(2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**15, 2.0**15),
        as_pytorch=False,
    ),
    ScaleSequence(
        "ceiling at the largest float32",
        "A growth that is infinite before the ceiling can cut it is left out, as it is without a ceiling.",
        LossScaling(init_scale=2.0**126, growth_interval=1, max_scale=LARGEST),
        "FF",
        still(LAST_POWER, LAST_POWER),
    ),
    ScaleSequence(
        "floor and ceiling in one",
        "A scale that may not move.",
        LossScaling(init_scale=128.0, growth_interval=1, min_scale=128.0, max_scale=128.0),
        "FINFI",
        still(128.0, 128.0, 128.0, 128.0, 128.0),
        as_pytorch=False,
    ),
    ScaleSequence(
        "shortened interval",
        "A run resumed with an interval below its tracker grows; PyTorch compares for equality and never grows again.",
        LossScaling(growth_interval=3),
        "FFFF",
        (*still(1024.0), (1024.0, 1), (1024.0, 2), *still(2048.0)),
        ScaleState(512.0, growth_tracker=7),
        as_pytorch=False,
    ),
]

NANS = [
    ScaleSequence(
        "NaN that passes",
        "The first eight are taken for overflow.",
        LossScaling(init_scale=512.0),
        "NNNNNNNNF",
        (*still(256.0, 128.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0), (2.0, 1)),
    ),
    ScaleSequence(
        "NaN that stays",
        "A NaN that outlives eight backoffs does not come from the scale, so the scale stays; the tracker is at zero.",
        LossScaling(init_scale=512.0),
        "NNNNNNNNNNN",
        still(256.0, 128.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 2.0, 2.0, 2.0),
        as_pytorch=False,
    ),
    ScaleSequence(
        "NaN run broken by Inf",
        "An Inf says that the scale is too large after all: it backs off, and eight more NaN may.",
        LossScaling(init_scale=2.0**18),
        "NNNNNNNNNI" + "NNNNNNNNN",
        still(*(2.0**power for power in (17, 16, 15, 14, 13, 12, 11, 10, 10, 9)))
        + still(*(2.0**power for power in (8, 7, 6, 5, 4, 3, 2, 1, 1))),
        as_pytorch=False,
    ),
    ScaleSequence(
        "NaN run broken by a finite step",
        "A finite iteration ends the run: what counts is a NaN that persists.",
        LossScaling(init_scale=2.0**18),
        "NNNNNNNNNF" + "NNNNNNNNN",
        (
            *still(*(2.0**power for power in (17, 16, 15, 14, 13, 12, 11, 10, 10))),
            (2.0**10, 1),
            *still(*(2.0**power for power in (9, 8, 7, 6, 5, 4, 3, 2, 2))),
        ),
        as_pytorch=False,
    ),
    ScaleSequence(
        "NaN now and then",
        "Fewer than eight in a row never reach the limit, however many there are in all.",
        LossScaling(init_scale=64.0, growth_interval=1),
        "NNNFFNNNFFNNNFFN",
        still(32.0, 16.0, 8.0, 16.0, 32.0, 16.0, 8.0, 4.0, 8.0, 16.0, 8.0, 4.0, 2.0, 4.0, 8.0, 4.0),
    ),
    ScaleSequence(
        "no backoff for NaN",
        "With a limit of zero only an Inf lowers the scale.",
        LossScaling(init_scale=64.0, max_nan_backoffs=0),
        "NFNIN",
        (*still(64.0), (64.0, 1), *still(64.0, 32.0, 32.0)),
        as_pytorch=False,
    ),
    ScaleSequence(
        "every NaN backs off",
        "Without a limit the rule is PyTorch's.",
        LossScaling(init_scale=1024.0, max_nan_backoffs=None),
        "NNNNNNNNNN",
        still(512.0, 256.0, 128.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0),
    ),
    ScaleSequence(
        "NaN on the floor",
        "The floor holds for NaN too.",
        LossScaling(init_scale=2.0, min_scale=1.0),
        "NNI",
        still(1.0, 1.0, 1.0),
        as_pytorch=False,
    ),
]

SEQUENCES = [*ORDINARY, *BOUNDS, *NANS]
