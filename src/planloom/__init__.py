"""Planloom: from an unchanged PyTorch model and a cluster to the fastest plan, proven correct and run under torchrun.

plan = planloom.plan(model, batch, cluster="dgx-h100", nodes=4).plan  # or planloom.load_plan("plan.json")
trainer = planloom.parallelize(model, plan, optimizer=functools.partial(torch.optim.AdamW, lr=3e-4))
for batch in batches:
    loss = trainer.step(batch)
"""

from importlib import import_module
from typing import Any

_WHERE = {
    "capture": "planloom.capture",
    "batch_spec": "planloom.capture",
    "dimension_rule": "planloom.capture",
    "load_model": "planloom.capture",
    "find_blocks": "planloom.blocks",
    "load_cluster": "planloom.cluster",
    "draft": "planloom.plan",
    "load_plan": "planloom.plan",
    "save_plan": "planloom.plan",
    "build_program": "planloom.program",
    "verify_program": "planloom.program",
    "parallelize": "planloom.train",
    "plan": "planloom",
    "Mesh": "planloom.layout",
    "PlanloomError": "planloom.errors",
}

__all__ = sorted(_WHERE)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Public names are imported at first use, so that `import planloom` does not pay for torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'planloom' has no attribute {name!r}")
    if name == "plan":  # a package that can be called
        return import_module("planloom.plan")
    module = import_module(_WHERE[name])
    return getattr(module, name)
