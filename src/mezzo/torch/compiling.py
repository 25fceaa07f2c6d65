"""What mezzo has to arrange with PyTorch's compiler, so that compiled code computes as eager code does.

For the length of a compilation, and in its thread, the settings of PyTorch that decide about the backward pass and about
code kept on disk are what regions of mezzo's need. Dynamo announces its compilations to a handler; that is wrapped, once.
Outside of them nothing is changed, and the compiler is not imported here: a program that compiles nothing pays nothing.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from mezzo import __version__
from mezzo.errors import RegionError
from mezzo.torch.eager import not_compiled_alone

__all__ = ["Compiler", "NO_TOKEN", "forget_compiled_code", "watch_compiler"]

NO_TOKEN = (
    "compiled code can tell {count} policies apart in a process, and the policy of this region came after them. Run it in "
    "eager code, or compile in a process that uses fewer policies."
)
_MARK = "mezzo:"
_CALLBACKS = "torch._dynamo.callback"


class Compiler:
    """What a compilation has to know; one object per process.

    Attributes:
        in_region: Says whether this thread is in a region whose policy compiled code is to be bound to.
        refusal: Says why this thread must not compile; empty if it may.
        meanings: Says what the states that stand for policies mean in this process.
    """

    def __init__(
        self, in_region: Callable[[], bool], refusal: Callable[[], str], meanings: Callable[[], Sequence[str]]
    ) -> None:
        self.in_region, self.refusal, self.meanings = in_region, refusal, meanings
        self._rules: dict[str, str] = {}
        self._tags = threading.local()

    def follow(self, device_type: str, meaning: str) -> None:
        """Have plain regions compiled anew, since they now follow other rules.

        Args:
            device_type: The accelerator whose table has changed; empty if it is the policy of all plain regions.
            meaning: What the rules do; empty if PyTorch's own kernels rule.
        """
        if meaning != self._rules.get(device_type, ""):
            self._rules[device_type] = meaning
            watch_compiler(self)
            forget_compiled_code()

    @contextmanager
    @not_compiled_alone
    def compiling(self, traces: bool) -> Iterator[None]:
        """Hold PyTorch's settings for a compilation.

        Args:
            traces: Whether user code is traced, or only compiled that was traced before.

        Raises:
            RegionError: Code traced here could not be told from that of another policy.
        """
        refusal = self.refusal() if traces else ""
        if refusal:
            raise RegionError(refusal)
        outer = getattr(self._tags, "users", None)
        users = _users_tag() if outer is None else outer
        self._tags.users = users
        self.mark_disk_cache()
        try:
            with self._backward_as_in_eager() if traces else _nothing():
                yield
        finally:
            self._tags.users = outer
            if outer is None:
                torch.compiler.config.cache_key_tag = users

    @not_compiled_alone
    def mark_disk_cache(self, *, unheard: bool = False) -> None:
        """Have code that is kept on disk found again only where the same states stand for the same policies.

        What the user has put into this setting stays in front. Called again when a compilation meets a policy that is new.

        Args:
            unheard: Also if no compilation has been heard of. The first region of a process may be one inside of a graph,
                and the mark of that compilation stays until the next one ends.
        """
        users = getattr(self._tags, "users", None)
        meanings = [*(f"{device} {rules}" for device, rules in sorted(self._rules.items()) if rules), *self.meanings()]
        if not meanings or (users is None and not unheard):
            return
        digest = hashlib.sha256("\n".join((__version__, *meanings)).encode()).hexdigest()
        torch.compiler.config.cache_key_tag = f"{_users_tag() if users is None else users}{_MARK}{digest}"

    def _backward_as_in_eager(self) -> AbstractContextManager[None]:
        """Have the backward pass compiled as eager code runs it outside of the region."""
        import torch._functorch.config as functorch  # noqa: PLC0415 - part of the compiler

        if not self.in_region() or getattr(functorch, "backward_pass_autocast", None) != "same_as_forward":
            return _nothing()
        return functorch.patch(backward_pass_autocast="off")  # type: ignore[no-any-return]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _users_tag() -> str:
    return str(torch.compiler.config.cache_key_tag).partition(_MARK)[0]


_lock = threading.Lock()
_watching = False


def watch_compiler(compiler: Compiler) -> None:
    """Hear of compilations from now on, or from when the compiler is imported; once is enough.

    Args:
        compiler: What they have to know.
    """
    global _watching  # noqa: PLW0603 - once per process
    with _lock:
        if _watching:
            return
        _watching = True
        module = sys.modules.get(_CALLBACKS)
        if module is not None:
            _wrap_handler(module, compiler)
        else:
            sys.meta_path.insert(0, _WhenImported(compiler))


def _wrap_handler(module: ModuleType, compiler: Compiler) -> None:
    handler = module.callback_handler
    original = handler.install_callbacks

    @contextmanager
    @not_compiled_alone
    def install_callbacks(trigger: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with compiler.compiling(trigger is module.CallbackTrigger.DYNAMO), original(trigger, *args, **kwargs):
            yield

    # Not a callback in its list: torch.compiler.reset() empties that, and of two threads that compile one runs it.
    handler.install_callbacks = install_callbacks


class _WhenImported(MetaPathFinder):
    """Waits for the module that has the handler, and goes."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _CALLBACKS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapping(spec.loader, self._compiler)
        return spec


class _Wrapping(Loader):
    def __init__(self, loader: Loader, compiler: Compiler) -> None:
        self._loader, self._compiler = loader, compiler

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # As if nobody had been here: tools look for the source by the loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        _wrap_handler(module, self._compiler)


def forget_compiled_code() -> None:
    """Have all compiled functions compiled again when they are called next, since a policy that they follow has changed."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset_code_caches()
