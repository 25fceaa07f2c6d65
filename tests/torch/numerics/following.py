"""A mode that carries a float32 run beside the real one, as the tools do."""

from __future__ import annotations

from typing import Any

from mezzo.torch.shadowing.shadow import Shadow
from mezzo.torch.watch_mode import WatchMode


class Following(WatchMode):
    """Follow every op, and write down its name and errors."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = Shadow()
        self.errors: list[tuple[str, list[float | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ready = self.shadow.before(func, args, kwargs)
        out = func(*args, **kwargs)
        self.errors.append((func._schema.name, self.shadow.follow(func, args, kwargs, out, ready)))
        return out

    def of(self, op: str) -> list[float | None]:
        """Give the errors of the last op of that name."""
        return [errors for name, errors in self.errors if name == f"aten::{op}"][-1]
