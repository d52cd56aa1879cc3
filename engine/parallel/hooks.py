"""Puts a sequence plan on a denoiser: hooks that cut its tensors over ranks and make its output whole again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from saggar.engine.attention.site import Streams, gather
from saggar.engine.errors import Unsupported
from saggar.engine.parallel.convolve import share_convolution
from saggar.engine.parallel.mesh import Axis, shares
from saggar.engine.parallel.plans import Gather, SequencePlan, Split, matches

_W = TypeVar("_W")


def apply_plan(denoiser: torch.nn.Module, plan: SequencePlan, axis: Axis, streams: Streams) -> None:
    """`plan` as `SequencePlan.of` gave it. Unsupported: it names what the denoiser has not."""
    for pattern, splits in plan.splits.items():
        for name, module in modules(denoiser, pattern):
            _split_inputs(
                name, module, {k: s for k, s in splits.items() if isinstance(k, str)}, axis, streams
            )
            outputs = {k: s for k, s in splits.items() if isinstance(k, int)}
            if outputs:
                module.register_forward_hook(_output_splitter(outputs, axis, streams))
    for pattern, wishes in plan.wholes.items():
        for name, module in modules(denoiser, pattern):
            _gather_inputs(name, module, wishes, axis, streams)
    for pattern, stream in plan.convolutions.items():
        for name, module in modules(denoiser, pattern):
            share_convolution(name, module, stream, axis, streams)
    for pattern, wish in plan.gathers.items():
        for _, module in modules(denoiser, pattern):
            module.register_forward_hook(_gatherer(wish, axis, streams))


def modules(denoiser: torch.nn.Module, pattern: str) -> list[tuple[str, torch.nn.Module]]:
    """The modules that a pattern means. Unsupported: there is none."""
    found = [(name, module) for name, module in denoiser.named_modules() if matches(pattern, name)]
    if not found:
        raise Unsupported(
            f"the sequence plan does not apply: {type(denoiser).__name__} has no module {pattern!r}"
        )
    return found


def _split_inputs(
    name: str, module: torch.nn.Module, splits: Mapping[str, Split], axis: Axis, streams: Streams
) -> None:
    order = _parameters(name, module, splits)

    def before(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for split in splits.values():
            if split.stream is not None and split.unit is not None:
                place = order.index(split.unit)
                streams.units[split.stream] = kwargs[split.unit] if split.unit in kwargs else args[place]
        return _changed(order, args, kwargs, splits, lambda value, split: _cut(value, split, axis, streams))

    if splits:
        module.register_forward_pre_hook(before, with_kwargs=True)


def _gather_inputs(
    name: str, module: torch.nn.Module, wishes: Mapping[str, Gather], axis: Axis, streams: Streams
) -> None:
    order = _parameters(name, module, wishes)

    def whole(value: object, wish: Gather) -> object:
        assert isinstance(value, torch.Tensor)
        return gather(value, wish.dim, streams.shares(wish.stream, axis.size), axis)

    def before(
        _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _changed(order, args, kwargs, wishes, whole)

    module.register_forward_pre_hook(before, with_kwargs=True)


def _parameters(name: str, module: torch.nn.Module, wanted: Mapping[str, object]) -> list[str]:
    """Of the module, in order. Unsupported: one that is wanted is not among them."""
    order = list(inspect.signature(module.forward).parameters)
    for parameter in wanted:
        if parameter not in order:
            raise Unsupported(
                f"the sequence plan does not apply: {name or 'the denoiser'} takes no {parameter}"
            )
    return order


def _changed(
    order: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: Mapping[str, _W],
    change: Callable[[object, _W], object],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, those that are wanted changed, whether they were named or not."""
    given, named = list(args), dict(kwargs)
    for parameter, wish in wanted.items():
        place = order.index(parameter)
        if parameter in named:
            named[parameter] = change(named[parameter], wish)
        elif place < len(given):
            given[place] = change(given[place], wish)
    return tuple(given), named


def _output_splitter(splits: Mapping[int, Split], axis: Axis, streams: Streams) -> Callable[..., object]:
    def after(_: torch.nn.Module, args: object, output: object) -> object:
        if isinstance(output, torch.Tensor):
            return _cut(output, splits[0], axis, streams)
        values = list(cast("Sequence[object]", output))
        for place, split in splits.items():
            values[place] = _cut(values[place], split, axis, streams)
        return tuple(values)

    return after


def _gatherer(wish: Gather, axis: Axis, streams: Streams) -> Callable[..., object]:
    def after(_: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return gather(output, wish.dim, streams.shares(wish.stream, axis.size), axis)

    return after


def _cut(value: object, split: Split, axis: Axis, streams: Streams) -> object:
    """This rank's share, of a tuple of each; what is neither tensor nor number, or has other dimensions, is
    everybody's.
    """
    if isinstance(value, int):
        return shares(value, axis.size)[axis.index]
    if isinstance(value, tuple):
        return tuple(_cut(one, split, axis, streams) for one in value)
    if not isinstance(value, torch.Tensor) or split.dims not in (None, value.ndim):
        return value
    length = value.shape[split.dim]
    if split.stream is None:
        sizes = list(shares(length, axis.size))
    else:
        streams.lengths[split.stream] = length
        sizes = streams.shares(split.stream, axis.size)
    share = value.narrow(split.dim, sum(sizes[: axis.index]), sizes[axis.index])
    # A copy: a compiled block would be compiled once more for strides that no other block's input has.
    return share.clone(memory_format=torch.contiguous_format)
