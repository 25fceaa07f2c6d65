"""What is measured and what is promised about it: a list of cases, as data that needs no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from benchmarks.jax_cases import JAX_CASES, JaxCase
from benchmarks.tensorplay_cases import TENSORPLAY_CASES, TensorplayCase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pairing import Kind

Workload = Literal["model", "inference", "op", "rule", "enter", "scaler", "beside", "prepare", "apex", "watched"]

MODEL_BOUND = 1.02
DEFAULT_BOUNDS = {"blocks": 1.10, "encoder-1x32": 1.03, "encoder-4x128": 1.03}
OP_BOUND = 5e-6
CONVOLUTION_BOUND = 12e-6
ENTER_BOUND = 2.0
SCALER_BOUND = 1.05
# 1.00, within what two processes differ by anyway.
BESIDE_BOUND = 1.02
# At least 1.4 times faster.
KEPT_BOUND = 1 / 1.4
APEX_BOUND = 1.03
EXPLAIN_BOUND = 2.0
FIND_BOUND = 1.5
HISTORY_BOUND = 1.05
# 1.00, within what two scalers or two processes differ by anyway.
UNWATCHED_BOUND = 1.02
# A step takes a tenth of a second and more than one; the bounds leave room for what few rounds miss.
WATCHED_ROUNDS = {"encoder-1x32": 5, "encoder-4x128": 3}
# How many times as fast as its rival a prepared model is, by work, size and rival.
PREPARE_SPEEDS: dict[str, float | None] = {
    "infer-1x1-autocast": 1.7,
    "infer-1x16-autocast": 1.4,
    "infer-1x1-bfloat16": 0.95,
    "infer-1x16-bfloat16": 0.95,
    "train-1x32-autocast": 1.2,
    "train-4x128-autocast": 1.04,
    "train-1x32-compiled": 1.3,
    "train-4x128-compiled": 1.08,
    "train-1x32-bfloat16": None,
    "train-4x128-bfloat16": None,
}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: What ``--case`` selects, by the whole name or by its first words.
        title: What the table shows.
        workload: Which kind of work, see ``benchmarks.workloads``.
        subject: The model, the op, the way of entering, or the parameters that are stepped.
        policy: The policy of mezzo's region.
        kind: Whether mezzo's time is divided by PyTorch's or PyTorch's is taken from it.
        bound: The promise, in the unit of ``kind`` (differences in seconds); None for information only.
        registers_first: Whether mezzo's process registers kernels before it is measured.
        together: Whether all sides take turns in one process, on the same tensors. Kernels are registered for a whole
            process, so that what autocasts cannot; a scaler and what watches can, and nothing else differs then.
        most_rounds: How many rounds of a set are enough; for work that takes long and bounds that are wide.
        worker: The module that plays a side.
    """

    name: str
    title: str
    workload: Workload
    subject: str
    policy: str | None
    kind: Kind
    bound: float | None
    registers_first: bool = False
    together: bool = False
    most_rounds: int | None = None
    worker: ClassVar[str] = "benchmarks.worker"

    @property
    def rival_loads_mezzo(self) -> bool:
        """Whether the side under "torch" and its control are mezzo too."""
        return self.workload in ("apex", "watched")


_MODELS = {
    "blocks": "12 x (LayerNorm, Linear 64, GELU, Linear), batch 8",
    "encoder-1x32": "encoder, 6 layers d=768, (1, 32)",
    "encoder-4x128": "encoder, 6 layers d=768, (4, 128)",
}

# Ops that PyTorch's CPU autocast lists itself: the same rule, served once by mezzo and once by PyTorch.
_LISTED_OPS = ("mm", "bmm", "matmul", "addmm", "linear", "conv2d", "scaled_dot_product_attention", "mse_loss", "cat")

# Ops that PyTorch's CPU autocast leaves alone and "unified" does not.
_CHANGED_OPS = ("softmax", "layer_norm", "sum", "exp", "mv")

# Ops that PyTorch lists as low and "fp32" lifts.
_LIFTED_OPS = ("mm", "linear", "conv2d")

_STEPS = {
    "small-unscale": "300 x 1,000 elements, SGD (foreach): unscale_, step, update",
    "small-step": "300 x 1,000 elements, SGD (foreach): step, update",
    "small-fused": "300 x 1,000 elements, Adam (fused): step, update",
    "large-unscale": "10 x 10,000,000 elements, SGD (foreach): unscale_, step, update",
    "large-step": "10 x 10,000,000 elements, SGD (foreach): step, update",
}

_BESIDE = {
    "training": "12 x (LayerNorm, Linear 64, GELU, Linear), batch 8: forward, backward, SGD",
    "mm": "mm, 16 x 16, in a region",
    "enter": "enter and exit a new region",
}

_PREPARED = {"infer": "inference", "train": "training, AdamW (fused)"}
_RIVALS = {
    "autocast": "against torch.autocast over float32 weights",
    "compiled": "the same with compiled=True",
    "bfloat16": "against the model cast whole to bfloat16",
}

_NETS = {
    "tiny": "Linear, BatchNorm1d, ReLU, Linear; 64 wide, batch 16",
    "mlp": "6 x Linear 512, batch 64",
    "many": "150 x Linear 16, batch 8",
}
_OPTIMIZERS = {"sgd": "SGD (foreach)", "adam": "Adam (foreach)", "fused": "Adam (fused)"}
_STYLES = {
    "unscale": "against scale, unscale_, step, update",
    "step": "against scale, step, update",
    "none": "against float32 without mezzo",
    "delayed": "4 blocks, 3 of them with delay_unscale, against 4 x scale, then step, update",
    "blocks": "4 blocks, each of which unscales, against 4 x scale, then step, update",
}
# By level, net, optimizer and style. A block that unscales does what plain mezzo does once in a step, four times.
_APEX: dict[str, float | None] = {
    "O1-tiny-sgd-unscale": APEX_BOUND,
    "O1-tiny-adam-unscale": APEX_BOUND,
    "O1-mlp-sgd-unscale": APEX_BOUND,
    "O1-many-sgd-unscale": APEX_BOUND,
    "O1-many-sgd-step": APEX_BOUND,
    "O1-many-fused-step": APEX_BOUND,
    "O2-tiny-sgd-unscale": APEX_BOUND,
    "O2-mlp-adam-unscale": APEX_BOUND,
    "O2-many-sgd-unscale": APEX_BOUND,
    "O2-many-adam-step": APEX_BOUND,
    "O0-many-sgd-none": APEX_BOUND,
    "O1-mlp-sgd-delayed": APEX_BOUND,
    "O1-mlp-sgd-blocks": None,
}

_STEP = "forward in a region, backward"
# By tool and what it is held against the same without: which call, and what it may cost.
_WATCHED: dict[str, tuple[str, float | None]] = {
    "explain-encoder-1x32": (f"{_MODELS['encoder-1x32']}: {_STEP}; explain(), recording", EXPLAIN_BOUND),
    "explain-encoder-4x128": (f"{_MODELS['encoder-4x128']}: {_STEP}; explain(), recording", EXPLAIN_BOUND),
    "find-encoder-1x32": (f"{_MODELS['encoder-1x32']}: {_STEP}; find_nonfinite()", FIND_BOUND),
    "find-encoder-4x128": (f"{_MODELS['encoder-4x128']}: {_STEP}; find_nonfinite()", FIND_BOUND),
    "numerics-encoder-1x32": (f"{_MODELS['encoder-1x32']}: {_STEP}; explain(numerics=True), recording", None),
    "shadow-encoder-1x32": (f"{_MODELS['encoder-1x32']}: {_STEP}; explain(shadow=True), recording", None),
    "overflow-small-unscale": (
        f'{_STEPS["small-unscale"]}; GradScaler(on_overflow="explain"), no overflow',
        UNWATCHED_BOUND,
    ),
    "history-small-step": (f"{_STEPS['small-step']}; ScaleHistory(scaler)", HISTORY_BOUND),
    "before-blocks": (
        f"{_MODELS['blocks']}: {_STEP}; explain and find_nonfinite used before in the process",
        UNWATCHED_BOUND,
    ),
}

_ENTERING = {"new": "a new region", "again": "one region, entered again"}
_POLICIES: tuple[str | None, ...] = (None, "torch", "unified")


def _model_cases() -> list[Case]:
    plain = [
        Case(f"model-{model}", f'{title}; policy "torch"', "model", model, "torch", "ratio", MODEL_BOUND)
        for model, title in _MODELS.items()
    ]
    default = [
        Case(
            f"default-{model}", f'{title}; policy "default"', "model", model, "default", "ratio", DEFAULT_BOUNDS[model]
        )
        for model, title in _MODELS.items()
    ]
    after = [
        Case(
            f"registered-{model}",
            f'{title}; policy "torch" after "unified" kernels are registered',
            "model",
            model,
            "torch",
            "ratio",
            None,
            registers_first=True,
        )
        for model, title in _MODELS.items()
    ]
    return plain + default + after


def _inference_cases() -> list[Case]:
    title = "ten inferences, 6 layers d=768, one token"
    return [
        Case(f"kept-{way}", f"{title}; {how}", "inference", way, "default", "ratio", KEPT_BOUND)
        for way, how in (
            ("unchanged", "casts kept across regions"),
            ("slow-path", "the same without PyTorch's fused layer"),
        )
    ]


def _op_cases() -> list[Case]:
    listed = [
        Case(
            f"op-{op}",
            f"{op}: mezzo's kernel against PyTorch's",
            "op",
            op,
            "torch",
            "difference",
            CONVOLUTION_BOUND if op.startswith("conv") else OP_BOUND,
        )
        for op in _LISTED_OPS
    ]
    changed = [
        Case(
            f"rule-{op}",
            f'{op}: "unified" against the same dtypes written by hand',
            "rule",
            op,
            "unified",
            "difference",
            OP_BOUND,
        )
        for op in _CHANGED_OPS
    ]
    lifted = [
        Case(
            f"lifted-{op}",
            f'{op}: "fp32" against the call outside any region',
            "rule",
            op,
            "fp32",
            "difference",
            CONVOLUTION_BOUND if op.startswith("conv") else OP_BOUND,
        )
        for op in _LIFTED_OPS
    ]
    return changed + lifted + listed


def _enter_cases() -> list[Case]:
    return [
        Case(
            f"enter-{way}-{policy or 'default'}",
            f"enter and exit {title}; policy {policy!r}",
            "enter",
            way,
            policy,
            "ratio",
            ENTER_BOUND,
        )
        for way, title in _ENTERING.items()
        for policy in _POLICIES
    ]


def _scaler_cases() -> list[Case]:
    return [
        Case(f"scaler-{subject}", title, "scaler", subject, None, "ratio", SCALER_BOUND, together=True)
        for subject, title in _STEPS.items()
    ]


def _beside_cases() -> list[Case]:
    return [
        Case(f"beside-{subject}", title, "beside", subject, None, "ratio", BESIDE_BOUND)
        for subject, title in _BESIDE.items()
    ]


def _prepare_cases() -> list[Case]:
    return [
        Case(
            f"prepare-{subject}",
            _prepare_title(*subject.split("-")),
            "prepare",
            subject,
            None,
            "ratio",
            None if speed is None else 1 / speed,
        )
        for subject, speed in PREPARE_SPEEDS.items()
    ]


def _prepare_title(task: str, size: str, rival: str) -> str:
    return f"encoder, 6 layers d=768, ({size.replace('x', ', ')}): {_PREPARED[task]}; {_RIVALS[rival]}"


def _apex_cases() -> list[Case]:
    return [
        Case(f"apex-{subject}", _apex_title(*subject.split("-")), "apex", subject, None, "ratio", bound)
        for subject, bound in _APEX.items()
    ]


def _apex_title(level: str, net: str, optimizer: str, style: str) -> str:
    return f"{level}; {_NETS[net]}; {_OPTIMIZERS[optimizer]}; {_STYLES[style]}"


def _watched_cases() -> list[Case]:
    return [
        Case(
            f"watched-{subject}",
            title,
            "watched",
            subject,
            "default" if subject.endswith(tuple(_MODELS)) else None,
            "ratio",
            bound,
            # What one use leaves behind in a process, all sides in it would have.
            together=not subject.startswith("before"),
            most_rounds=WATCHED_ROUNDS.get(subject.partition("-")[2]),
        )
        for subject, (title, bound) in _WATCHED.items()
    ]


CASES: tuple[Case, ...] = (
    *_model_cases(),
    *_inference_cases(),
    *_op_cases(),
    *_enter_cases(),
    *_scaler_cases(),
    *_beside_cases(),
    *_prepare_cases(),
    *_apex_cases(),
    *_watched_cases(),
)


def select(names: Sequence[str]) -> list[Case]:
    """The cases whose names are, or begin with the words of, one of ``names``; all of them for no names.

    Names of `JAX_CASES` and `TENSORPLAY_CASES` are known here and select nothing: `benchmarks.jax_page` and
    `benchmarks.tensorplay_page` do.
    """
    chosen = [case for case in CASES if not names or any(is_named(case, name) for name in names)]
    everything = (*CASES, *JAX_CASES, *TENSORPLAY_CASES)
    unknown = [name for name in names if not any(is_named(case, name) for case in everything)]
    if unknown:
        known = ", ".join(case.name for case in everything)
        message = f"no case is called {', '.join(unknown)}; expected, whole or its first words: {known}."
        raise ValueError(message)
    return chosen


def case_named(name: str) -> Case:
    """The one case of exactly this name."""
    return next(case for case in CASES if case.name == name)


def is_named(case: Case | JaxCase | TensorplayCase, name: str) -> bool:
    return case.name == name or case.name.startswith(f"{name}-")
