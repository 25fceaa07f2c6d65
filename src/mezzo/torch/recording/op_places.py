"""Where an op belongs: the module, the user's line and the pass, for a backward op those of the forward op.

Autograd numbers the nodes of its graph as they are made (``_sequence_nr``), in the thread that makes them. The number of the
last node is known while the op that it belongs to runs, so a table of numbers leads from a backward node to the forward op.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import torch

from .call_sites import CallSite, call_site
from .listed_ops import Listed
from .module_stack import NOWHERE, Running, current

__all__ = ["OpPlaces", "Place", "rank_here"]

_node_now = torch._C._current_autograd_node
_next_number = torch._C._autograd._get_sequence_nr


class Place(NamedTuple):
    """Where an op belongs.

    Attributes:
        running: The module.
        phase: ``"forward"``, ``"backward"``, ``"recomputation"`` or ``"optimizer"``.
        site: The user's line and what lies between.
        backward_of: The forward op's name, for a backward op; empty if it is not known.
        node: The name of the backward node; empty in forward.
    """

    running: Running
    phase: str
    site: CallSite
    backward_of: str = ""
    node: str = ""


class OpPlaces:
    """The places of ops, for one who watches.

    Args:
        most: How many forward ops to remember. The oldest are forgotten: their backward passes have been long ago.
    """

    def __init__(self, most: int = 200_000) -> None:
        self._forward: dict[int, tuple[Running, str, CallSite]] = {}
        self._most = most
        self._first = _next_number()

    def now(self, depth: int = 1) -> Place:
        """Give the place of the op that runs.

        Args:
            depth: How many frames above this function's caller belong to the mode.
        """
        node = _node_now()
        site = call_site(in_backward=node is not None, depth=depth + 1)
        running = current()
        if node is None:
            phase = "optimizer" if site.stepping else "backward" if site.starts_backward else "forward"
            return Place(running, phase, site)
        if site.recomputed:
            return Place(running, "recomputation", site, node=node.name())
        return self._in_backward(node, running, site)

    def _in_backward(self, node: Any, running: Running, site: CallSite) -> Place:
        name = str(node.name())
        known = self._forward.get(node._sequence_nr())
        if known is None or running != NOWHERE:
            return Place(running, "backward", site, node=name)
        forward_running, op, forward_site = known
        if isinstance(node, torch._C._FunctionBase):  # a custom Function's, of which the op is but a part
            op = name.removesuffix("Backward")
        return Place(forward_running, "backward", site if site.code else forward_site, op, name)

    def note(self, place: Place, op: str) -> None:
        """Remember a forward op by the autograd node that has been made for it, if one has.

        Args:
            place: Its place.
            op: Its name.
        """
        if place.phase not in ("forward", "recomputation"):
            return
        # Not asked is whether gradients are on: a custom Function's forward runs without, and its node is there before.
        number = _next_number() - 1
        # Of several ops without a node of their own, the first after it was made is the one it was made for.
        if number >= self._first and number not in self._forward:
            self._forward[number] = place.running, op, place.site
            if len(self._forward) > self._most:
                for old in list(islice(self._forward, self._most // 2)):
                    del self._forward[old]

    def note_view(self, op: str) -> None:
        """Remember an op that only makes a view, and is not looked at otherwise: its backward may compute.

        Args:
            op: Its name.
        """
        number = _next_number() - 1
        if number >= self._first and number not in self._forward:
            self.note(self.now(), op)

    def place_of(self, listed: Listed, key: object, depth: int = 1) -> Place:
        """Give the place of a listed op, which the ops inside have too; looked up once.

        Args:
            listed: The op.
            key: Under which it is kept there.
            depth: How many frames above this function's caller belong to the mode.
        """
        place = listed.notes.get(key)
        if place is None:
            place = listed.notes[key] = self.now(depth + 1)
        return place


def rank_here() -> int | None:
    """Give the rank of this process; None if there is no process group."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else None
