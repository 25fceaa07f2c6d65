"""What ``mezzo run`` was asked for, checked before the script starts: a wrong option must not cost a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mezzo.builtin import resolve_policy
from mezzo.errors import OptionError
from mezzo.policy import Policy

from .script_runner import Target

__all__ = ["STEPS", "RunPlan", "RunScript", "plan_of"]

STEPS = 3
"""How many steps of an optimizer are recorded if nothing else is asked for."""

_DIGITS = 18

_SUFFIXES = (".html", ".json", ".txt")


@dataclass(frozen=True)
class RunPlan:
    """What to run and what to watch.

    Attributes:
        target: The script.
        explain: Whether to record what mixed precision does to each op.
        numerics: Whether the records have numbers.
        shadow: Whether they have the distance from a run in float32.
        find_nonfinite: Whether to look for the first op that makes NaN or Inf.
        lint: Whether to look at the model and the optimizer.
        policy: What steers the script's ``torch.autocast`` regions; None leaves them alone.
        report: Where to save the report; None saves none.
        steps: After how many steps of an optimizer recording ends; None records to the end.

    Example:
        >>> RunPlan(Target("train.py"), explain=True).watches
        True
    """

    target: Target
    explain: bool = False
    numerics: bool = False
    shadow: bool = False
    find_nonfinite: bool = False
    lint: bool = False
    policy: Policy | None = None
    report: Path | None = None
    steps: int | None = STEPS

    @property
    def watches(self) -> bool:
        """Whether there will be something to report."""
        return self.explain or self.find_nonfinite or self.lint


class RunScript(BaseException):
    """Ends the command line's own work: what remains is to run the script, outside of all that parses options.

    Attributes:
        plan: What to do.
    """

    def __init__(self, plan: RunPlan) -> None:
        super().__init__(plan)
        self.plan = plan


def plan_of(
    target: Target,
    *,
    explain: bool = False,
    numerics: bool = False,
    shadow: bool = False,
    find_nonfinite: bool = False,
    lint: bool = False,
    policy: str | None = None,
    report: Path | None = None,
    steps: str | None = None,
) -> RunPlan:
    """Check the options of ``mezzo run`` and settle what follows from them.

    Numbers, a shadow, steps and a report are asked of ``explain``, so each of them switches it on, the report only if
    nothing else is asked for that could be reported. So does a call that asks for nothing at all. A shadow needs numbers.

    Args:
        target: The script.
        explain: As in `RunPlan`.
        numerics: As in `RunPlan`.
        shadow: As in `RunPlan`.
        find_nonfinite: As in `RunPlan`.
        lint: As in `RunPlan`.
        policy: A built-in policy's name, or the path of a TOML file.
        report: Where to save the report, by its suffix as HTML, JSON or text.
        steps: A number, or ``"all"``; None for the default.

    Returns:
        The plan; its paths are absolute, since a script may change the folder it works in.

    Raises:
        OptionError: The script, the report's folder or its format does not exist, or ``steps`` is no such number.
        UnknownPolicyError: No built-in policy has this name.
        PolicyError: The policy is for another framework.
        OSError: The policy's file cannot be read.

    Example:
        >>> plan_of(Target("pkg.train", module=True), steps="all").explain
        True
    """
    _check_target(target)
    limit = _steps(steps)
    resolved = None if policy is None else resolve_policy(policy)
    if report is not None:
        report = _checked(report)
    others = find_nonfinite or lint or (policy is not None and report is None)
    return RunPlan(
        target,
        explain=explain or numerics or shadow or steps is not None or not others,
        numerics=numerics or shadow,
        shadow=shadow,
        find_nonfinite=find_nonfinite,
        lint=lint,
        policy=resolved,
        report=report,
        steps=limit,
    )


def _check_target(target: Target) -> None:
    if not target.module and not Path(target.name).exists():
        msg = f"There is no script {target.name!r}; give the path of a script, or -m and the name of a module."
        raise OptionError(msg)


def _steps(steps: str | None) -> int | None:
    if steps is None:
        return STEPS
    if steps == "all":
        return None
    if not (steps.isascii() and steps.isdigit() and steps.strip("0")):
        msg = f"--steps is {steps!r}; give a number from 1, or 'all' to record to the end of the script."
        raise OptionError(msg)
    # More than anyone makes, and Python reads no number of thousands of digits.
    digits = steps.lstrip("0")
    return int(digits) if len(digits) <= _DIGITS else None


def _checked(report: Path) -> Path:
    if report.suffix.lower() not in _SUFFIXES:
        msg = f"--report is {str(report)!r}; a report is written as {', '.join(_SUFFIXES)}, by the end of the file's name."
        raise OptionError(msg)
    if not report.absolute().parent.is_dir():
        msg = f"--report is {str(report)!r}, and there is no folder {str(report.absolute().parent)!r}; make it first."
        raise OptionError(msg)
    return report.absolute()
