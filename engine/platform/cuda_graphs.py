"""CUDA graphs of a module's forward: what the device does for inputs of one kind is recorded once and played again, so
that launching its kernels one by one costs nothing.

A graph stands for a signature: shapes and types of all tensors, and the values of all else. Inputs are copied into
the recording's own, the output is copied out, so that nobody holds what the next replay writes. Not for a forward
that reads a device's value on the CPU or takes tensors of the CPU: recording it fails, and says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from saggar.engine.errors import Unsupported
from torch.utils import _pytree as pytree

KEPT = 8
"""Graphs of one module; the one that was not used for longest goes first."""
_WARM = 3
"""Forwards before recording: kernels are chosen and compiled in them."""


@dataclass(frozen=True)
class _Recording:
    graph: Any
    inputs: list[torch.Tensor]
    output: Any


class Graphed:
    """A function of tensors on one device, by its recordings."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self._name = name
        self._known: OrderedDict[object, _Recording] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Let go of all recordings: the communication library cannot end while one of them holds its calls."""
        self._known.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns. Unsupported: it cannot be recorded."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (spec, *(_signature(leaf) for leaf in leaves))
        if key not in self._known:
            self._known[key] = self._record(leaves, spec)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        recording = self._known[key]
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for own, one in zip(recording.inputs, given, strict=True):
            own.copy_(one)
        recording.graph.replay()
        return pytree.tree_map_only(torch.Tensor, torch.clone, recording.output)

    def _record(self, leaves: list[Any], spec: pytree.TreeSpec) -> _Recording:
        own = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if any(isinstance(leaf, torch.Tensor) and not leaf.is_cuda for leaf in own):
            raise Unsupported(f"cuda_graphs: {self._name} takes a tensor that is not on the GPU")
        args, kwargs = pytree.tree_unflatten(own, spec)
        try:
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(_WARM):
                    self._function(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads, the communication library's watchdog among them, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self._function(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise Unsupported(f"cuda_graphs: {self._name} cannot be recorded: {reason}") from error
        return _Recording(graph, [leaf for leaf in own if isinstance(leaf, torch.Tensor)], output)


def _signature(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device)
    return leaf
