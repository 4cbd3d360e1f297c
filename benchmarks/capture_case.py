"""One model in a process of its own: capture it, find its blocks and segments, print what that took as JSON.

python -m benchmarks.capture_case llama3-8b 1700000000.0    # when the process was started, in seconds of time.time()
"""

import json
import resource
import sys
import time
from math import prod


def main(source: str, started: float) -> None:
    from planloom.blocks import find_blocks, find_segments
    from planloom.capture import capture, load_model
    from planloom.graph.flops import Counting, graph_flops, training_flops

    model, batch = load_model(source)
    loaded = time.time() - started
    graph = capture(model, batch)
    captured = time.time() - started
    blocks = find_blocks(graph)
    segments = find_segments(blocks)
    grouped = time.time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    countings: tuple[Counting, ...] = ("full", "causal", "weights")
    document = {
        "model": source,
        "load_seconds": loaded,
        "capture_seconds": captured,
        "blocks_seconds": grouped,
        "peak_rss_bytes": peak,
        "operators": len(graph.ops),
        "blocks": len(blocks.blocks),
        "segments": len(segments),
        "distinct_segments": len({segment.fingerprint for segment in segments}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "graph_parameters": sum(prod(graph.tensors[name].shape) for name in graph.parameters),
        "batch": {name: list(tensor.shape) for name, tensor in batch.items() if hasattr(tensor, "shape")},
        "forward_flops": {counting: graph_flops(graph, counting=counting) for counting in countings},
        "training_flops": {counting: training_flops(graph, counting=counting) for counting in countings},
    }
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
