"""Restore attention as eager execution calls it.

A trace of Hugging Face's attention has an explicit mask made of `arange`, and keys and values repeated for grouped
queries. Eager execution says `is_causal=True, enable_gqa=True` and uses faster kernels. Where the mask is a constant
that is causal, or true everywhere, and the repetition is plain, they are put back. Of attention with sinks also a
window: a band of so many keys.
"""

from dataclasses import replace

from planloom.capture.masks import Band, find_bands
from planloom.graph import Arg, Graph, Op, is_reference, reference, referenced

_ATTENTION = "aten.scaled_dot_product_attention.default"
_SINKS = "planloom.sink_attention.default"
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def restore_attention(graph: Graph) -> Graph:
    """The same graph with causal masks and grouped queries said, not computed."""
    if not any(op.target in (_ATTENTION, _SINKS) for op in graph.ops):
        return graph
    bands = find_bands(graph.given, graph.tensors)
    makers = {op.outputs[0]: op for op in (*graph.given, *graph.ops)}
    ops = []
    for op in graph.ops:
        if op.target == _ATTENTION:
            args: list[Arg] = [*op.args, *[op.kwargs.get(name) for name in _NAMES[len(op.args) :]]]
            args[4], args[5] = args[4] or 0.0, bool(args[5])
            query, key = (graph.tensors[op.inputs[i]] for i in range(2))
            is_mask = is_reference(args[3]) and graph.tensors[args[3][1:]].dtype == "bool"
            band = bands.get(args[3][1:]) if is_mask else None
            if band is not None and band.is_everywhere:
                args[3] = None
            elif band is not None and band.is_causal and query.shape[-2] == key.shape[-2]:
                args[3], args[5] = None, True
            kwargs: dict[str, Arg] = {name: op.kwargs[name] for name in ("scale", "enable_gqa") if name in op.kwargs}
            if args[3] is None:
                grouped = [_repeated(makers, graph, args[i][1:]) for i in (1, 2)]
                if all(grouped):
                    args[1:3] = [reference(str(name)) for name in grouped]
                    kwargs["enable_gqa"] = True
            op = replace(op, args=tuple(args), kwargs=kwargs, inputs=tuple(referenced([args, kwargs])))
        if op.target == _SINKS and is_reference(op.args[3]):
            op = _with_window(op, bands.get(op.args[3][1:]), num_keys=graph.tensors[op.inputs[1]].shape[-2])
        ops.append(op)
    return _without_unread(replace(graph, ops=tuple(ops)))


def _with_window(op: Op, band: Band | None, *, num_keys: int) -> Op:
    """Attention with sinks whose mask is a band: causal, perhaps with a window that hides something."""
    if band is None or not (band.is_everywhere or band.high == 0):
        return op
    args = list(op.args)
    args[3] = None
    if not band.is_everywhere:
        args[5], args[6] = True, 0 if band.low <= 1 - num_keys else 1 - int(band.low)
    return replace(op, args=tuple(args), inputs=tuple(referenced([args, op.kwargs])))


def _repeated(makers: dict[str, Op], graph: Graph, name: str) -> str:
    """What [batch, heads · group, …] repeats along its heads, or nothing."""
    chain = []
    for target in ("aten.reshape.default", "aten.expand.default", "aten.unsqueeze.default"):
        op = makers.get(name)
        if op is None or op.target != target:
            return ""
        chain.append(op)
        name = op.inputs[0]
    wide, source = graph.tensors[chain[1].outputs[0]].shape, graph.tensors[name].shape
    flat = graph.tensors[chain[0].outputs[0]].shape
    is_plain = len(source) == 4 and chain[2].args[1] % 5 == 2 and wide == (*source[:2], wide[2], *source[2:])
    return name if is_plain and flat == (source[0], source[1] * wide[2], *source[2:]) else ""


def _without_unread(graph: Graph) -> Graph:
    """Without operators whose results nobody reads any more."""
    wanted = {graph.loss, *graph.updates.values()}
    live: list[Op] = []
    for op in reversed((*graph.given, *graph.ops)):
        if wanted.intersection(op.outputs):
            wanted.update(op.inputs)
            live.append(op)
    kept = {op.name for op in live}
    return replace(
        graph,
        given=tuple(op for op in graph.given if op.name in kept),
        ops=tuple(op for op in graph.ops if op.name in kept),
        buffers=tuple(name for name in graph.buffers if name in wanted or name in graph.updates),
        tensors={n: t for n, t in graph.tensors.items() if n in wanted or n in graph.inputs or n in graph.updates},
    )
