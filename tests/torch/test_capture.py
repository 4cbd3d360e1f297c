"""Capture: the graph is the model, and what cannot be captured is refused with what to do."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from examples.models.gpt import GPT, GPTConfig
from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture, capture_from_spec
from planloom.capture.batch import arguments_from_spec
from planloom.errors import CaptureError
from planloom.execute import Interpreter, RunVjp
from planloom.graph import Graph, fingerprint
from planloom.graph.rules import flat
from tests.models import MODELS, loss_of
from tests.torch.captured import Captured, captured, of
from tests.torch.hand_runs import whole_model

BOTH = pytest.mark.parametrize("model", MODELS)


def graph_of(model: str) -> Graph:
    return captured(model, torch.float32).blocks.graph


# --- the graph is the model ------------------------------------------------------------------------------------------


@BOTH
def test_parameters_are_those_of_the_model_each_once(model: str) -> None:
    graph, parameters = graph_of(model), dict(captured(model, torch.float32).model.named_parameters())
    assert set(graph.parameters) == set(parameters)
    assert len(graph.parameters) == len(parameters)
    for name, parameter in parameters.items():
        assert graph.tensors[name].shape == tuple(parameter.shape)
        assert graph.tensors[name].dtype == "float32"


def test_a_tied_weight_is_one_tensor_with_two_readers() -> None:
    graph = graph_of("gpt")
    assert graph.tied == {"head.weight": "embed.weight"}
    readers = [op.module for op in graph.ops if "embed.weight" in op.inputs]
    assert readers == ["embed", "head"]
    assert graph_of("llama").tied == {}


@BOTH
def test_inputs_are_the_batch(model: str) -> None:
    found = captured(model, torch.float32)
    graph = found.blocks.graph
    assert graph.inputs == tuple(found.batch)
    assert {name: (graph.tensors[name].shape, graph.tensors[name].dtype) for name in graph.inputs} == batch_spec(
        found.batch
    )
    assert graph.tensors[graph.loss].shape == ()


@BOTH
def test_every_operator_has_a_rule_that_fits_its_tensors(model: str) -> None:
    graph = graph_of(model)
    for op in graph.ops:
        assert op.rule is not None, op.name
        names = (*op.inputs, *op.outputs)
        for name, term in zip(names, (*op.rule.inputs, *op.rule.outputs), strict=True):
            assert tuple(op.rule.sizes[factor] for factor in flat(term)) == graph.tensors[name].sizes, (op.name, name)
    for tensor in graph.tensors.values():
        assert tuple(int(torch.tensor(factors).prod()) for factors in tensor.factors) == tensor.shape


@BOTH
def test_given_tensors_depend_on_no_parameter(model: str) -> None:
    graph = graph_of(model)
    known = {*graph.inputs, *graph.buffers}
    for op in graph.given:
        assert known.issuperset(op.inputs), op.name
        known.update(op.outputs)
    assert all(set(op.inputs) - known for op in graph.ops)
    assert not any(map(graph.is_differentiable, known))


@BOTH
def test_a_graph_survives_json(model: str) -> None:
    graph = graph_of(model)
    again = msgspec.json.decode(msgspec.json.encode(graph), type=Graph)
    assert again == graph
    assert fingerprint(again) == fingerprint(graph)


def on_meta(model: str) -> nn.Module:
    """The model as one builds it without memory. (`.to("meta")` would untie its weights.)"""
    with torch.device("meta"):
        if model == "gpt":
            return GPT(GPTConfig())
        here = captured(model, torch.float32).model
        return type(here)(here.config)


@pytest.mark.parametrize(
    "model",
    [
        "gpt",
        pytest.param(
            "llama",
        ),
    ],
)
def test_a_model_on_meta_is_captured_as_one_in_memory(model: str) -> None:
    graph, batch = graph_of(model), captured(model, torch.float32).batch
    again = capture_from_spec(on_meta(model), batch_spec(batch))
    assert again == graph
    assert fingerprint(again) == fingerprint(graph)


def test_the_fingerprint_knows_shapes_and_dtypes() -> None:
    single = captured("gpt", torch.float32)
    half = {name: tensor[:4] for name, tensor in single.batch.items()}
    graphs = (single.blocks.graph, capture(single.model, half), captured("gpt", torch.float64).blocks.graph)
    assert len(set(map(fingerprint, graphs))) == 3


# --- the graph, run, is the model ------------------------------------------------------------------------------------


def run_whole(found: Captured) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the graph as one run on one device."""
    local = whole_model(found.blocks)
    names = [slot.tensor for slot in local.run.inputs]
    vjp = RunVjp(local, [found.parameters[name] for name in names], found.given, 0)
    (loss,) = vjp.take_outputs()
    gradients = vjp.backward([torch.ones_like(loss)])
    return loss, {name: g for name, g in zip(names, gradients, strict=True) if g is not None}


def run_eager(found: Captured) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(found.model, found.batch)
    names, parameters = zip(*((n, p) for n, p in found.model.named_parameters() if p.requires_grad), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.detach(), {name: g for name, g in zip(names, gradients, strict=True) if g is not None}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("model", "allowed"), [("gpt", 0), ("llama", 1e-6)])
def test_the_graph_computes_what_eager_computes(model: str, allowed: float) -> None:
    """Gpt bit by bit. Llama to rounding: its loss leaves labels out, and its weights a token are rounded once more."""
    (loss, gradients), (expected_loss, expected) = (
        run(captured(model, torch.float32)) for run in (run_whole, run_eager)
    )
    assert error(loss, expected_loss) <= 1e-6
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert error(gradient, expected[name]) <= allowed, name


class Model(nn.Module):
    """A linear map from [8, 4] to [8, 6] and whatever a test puts behind it."""

    def __init__(self, finish: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.map, self.finish = nn.Linear(4, 6), finish
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Tensor) -> Any:
        return self.finish(self, x)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1))}


def without_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        frozen = model.map(x)
    return (frozen * model.map(x)).sum()


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def hooked(model: Any, x: Tensor) -> Tensor:
    y = model.map(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)
    return y.sum()


SMALL: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "frozen parameters": (lambda m, x: m.last(m.map(x)).sum(), lambda: {"last": nn.Linear(6, 2).requires_grad_(False)}),
    "an unused parameter": (lambda m, x: m.map(x).sum(), lambda: {"last": nn.Linear(6, 2)}),
    "a weight used twice": (lambda m, x: F.linear(m.map(x), m.map.weight.t()).pow(2).sum(), dict),
    "a norm without weights": (
        lambda m, x: m.norm(m.map(x)).pow(3).sum(),
        lambda: {"norm": nn.LayerNorm(6, elementwise_affine=False)},
    ),
    "a norm without bias": (lambda m, x: m.norm(m.map(x)).pow(3).sum(), lambda: {"norm": nn.LayerNorm(6, bias=False)}),
    "a summed loss": (lambda m, x: F.cross_entropy(m.map(x), torch.arange(8) % 6, reduction="sum"), dict),
    "labels left out": (lambda m, x: F.cross_entropy(m.map(x), torch.arange(8) % 6, ignore_index=2), dict),
    "two losses": (lambda m, x: F.cross_entropy(m.map(x), torch.arange(8) % 6) + m.map(x).pow(2).mean(), dict),
    "operators in place": (lambda m, x: m.map(x).mul_(2).add_(1).pow(2).sum(), dict),
    "chunks": (lambda m, x: (lambda a, b: (a * b.sigmoid()).sum())(*m.map(x).chunk(2, 1)), dict),
    "three chunks, the last first": (
        lambda m, x: (lambda y: (y[:, 4:] * y[:, 2:4].sigmoid() - y[:, :2].pow(2) * y[:, 2:4]).sum())(m.map(x)),
        dict,
    ),
    "two of three chunks": (lambda m, x: (lambda y: (y[:, 4:] * y[:, :2].sigmoid()).sum())(m.map(x)), dict),
    "chunks, and all of them": (lambda m, x: (lambda y: (y[:, 3:] * y[:, :3] * y.sum()).sum())(m.map(x)), dict),
    "chunks along two dims": (
        lambda m, x: (lambda y: (y[:4] * y[4:]).sum() + (y[:, :3] * y[:, 3:].sigmoid()).sum())(m.map(x)),
        dict,
    ),
    "idle dropout": (lambda m, x: m.drop(m.map(x)).pow(2).sum(), lambda: {"drop": nn.Dropout(0.0)}),
    "one sample": (lambda m, x: m.map(x[:1]).pow(2).sum(), dict),
}
"""What is special → (what follows the map, further members of the model)."""

MUST_NOT_DIFFER: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "no_grad": (without_grad, dict),
    "autograd function": (lambda m, x: Straight.apply(m.map(x)).sum(), dict),
    "tensor hook": (hooked, dict),
    "a parameter named like an operator": (
        lambda m, x: (m.map(x) * m.linear).sum(),
        lambda: {"linear": nn.Parameter(torch.full((8, 6), 2.0))},
    ),
    "a parameter named like an input": (
        lambda m, x: (m.map(x) * m.map(m.x)).sum(),
        lambda: {"x": nn.Parameter(torch.full((8, 4), 2.0))},
    ),
    "a constant": (lambda m, x: (m.map(x) * torch.tensor([1.0, 2, 3, 4, 5, 6])).sum(), dict),
    "a detached factor": (lambda m, x: (m.map(x) * m.map(x).detach()).sum(), dict),
    "label smoothing": (lambda m, x: F.cross_entropy(m.map(x), torch.arange(8) % 6, label_smoothing=0.1), dict),
    "batch norm in evaluation": (
        lambda m, x: m.norm(m.map(x)).pow(3).sum(),
        lambda: {"norm": nn.BatchNorm1d(6).eval()},
    ),
    "a running sum": (lambda m, x: torch.cumsum(m.map(x), 1).pow(2).sum(), dict),
    "a convolution": (
        lambda m, x: m.conv(m.map(x).view(4, 2, 6)).pow(2).sum(),
        lambda: {"conv": nn.Conv1d(2, 4, 3, padding=1)},
    ),
    "written in place": (
        lambda m, x: (lambda y, z: (y.__setitem__((slice(None), slice(2, 4)), z[:, :2]), (y**2).sum())[1])(
            torch.zeros(8, 6), m.map(x)
        ),
        dict,
    ),
    "the largest of a row": (
        lambda m, x: (lambda y: (y - y.max(-1, keepdim=True).values).pow(2).sum())(m.map(x)),
        dict,
    ),
    "the two largest of a row": (lambda m, x: m.map(x).topk(2).values.pow(3).sum(), dict),
    "one of each row": (lambda m, x: m.map(x)[torch.arange(8), torch.arange(8) % 6].pow(2).sum(), dict),
    "some columns": (lambda m, x: m.map(x)[:, torch.tensor([0, 3, 3])].pow(3).sum(), dict),
    "repeated": (lambda m, x: (m.map(x).repeat(2, 1).pow(2) * torch.arange(16.0)[:, None]).sum(), dict),
    "interleaved": (lambda m, x: (m.map(x).repeat_interleave(2, 1) * torch.arange(12.0)).pow(2).sum(), dict),
    "a squared error of two shapes": (lambda m, x: F.mse_loss(m.map(x), torch.ones(8, 6)), dict),
    "an absolute error": (lambda m, x: F.l1_loss(m.map(x), torch.ones(8, 6)), dict),
    "indices from the end": (lambda m, x: m.map(x)[:, torch.tensor([-1, 0])].pow(3).sum(), dict),
    "one of each row, from the end": (
        lambda m, x: m.map(x)[torch.arange(8), torch.tensor([-1] * 8)].pow(2).sum(),
        dict,
    ),
    "one of every second row": (
        lambda m, x: m.map(x)[torch.arange(0, 8, 2), torch.tensor([1, 0, 2, 5])].pow(2).sum(),
        dict,
    ),
    "complex numbers": (
        lambda m, x: (
            torch.view_as_real(
                torch.view_as_complex(m.map(x).view(8, 3, 2)) * torch.polar(torch.ones(3), torch.arange(3.0))
            )
            .pow(3)
            .sum()
        ),
        dict,
    ),
    "cross entropy of images": (
        lambda m, x: F.cross_entropy(m.map(x).view(2, 3, 8), torch.arange(16).view(2, 8) % 3),
        dict,
    ),
    "batch norm without statistics": (
        lambda m, x: (m.norm(m.map(x)) + m.map(x)).pow(3).sum(),
        lambda: {"norm": nn.BatchNorm1d(6, track_running_stats=False)},
    ),
    "keys tiled over queries": (
        lambda m, x: (
            (
                lambda q: F.scaled_dot_product_attention(
                    q.view(1, 4, 4, 3),
                    *[q[:4].reshape(1, 2, 4, 3).unsqueeze(1).expand(1, 2, 2, 4, 3).reshape(1, 4, 4, 3)] * 2,
                )
            )(m.map(x))
            .pow(2)
            .sum()
        ),
        dict,
    ),
    "a mask that adds one": (
        lambda m, x: (
            F.scaled_dot_product_attention(
                *[m.map(x).view(1, 2, 4, 6)] * 3,
                attn_mask=(torch.arange(4)[None, None, None, :] <= torch.arange(4)[None, None, :, None]).float(),
            )
            .pow(2)
            .sum()
        ),
        dict,
    ),
    "attention without heads": (
        lambda m, x: F.scaled_dot_product_attention(*[m.map(x).view(2, 4, 6)] * 3, is_causal=True).pow(2).sum(),
        dict,
    ),
    "variance and mean": (lambda m, x: (lambda v, a: (v * a).sum())(*torch.var_mean(m.map(x), 1)), dict),
    "a squared error": (lambda m, x: F.mse_loss(m.map(x), torch.ones(8, 6)), dict),
    "a norm by torch": (lambda m, x: F.rms_norm(m.map(x), (6,)).pow(3).sum(), dict),
    "a loss of one element": (lambda m, x: m.map(x).sum().reshape(1), dict),
    "no parameter in the loss": (lambda m, x: x.sum(), dict),
}
"""As above; refusing such a model is right, too."""

CASES = [pytest.param(*case, False, id=name) for name, case in SMALL.items()] + [
    pytest.param(*case, True, id=name) for name, case in MUST_NOT_DIFFER.items()
]


@pytest.mark.parametrize(("finish", "members", "may_be_refused"), CASES)
def test_a_small_model_computes_what_eager_computes(
    finish: Callable[..., Any], members: Callable[[], dict[str, Any]], may_be_refused: bool
) -> None:
    torch.manual_seed(5)
    model = Model(finish, **members())
    try:
        graph = capture(model, batch())
    except CaptureError:
        assert may_be_refused
        return
    found = of(model, batch(), find_blocks(graph))
    (loss, gradients), (expected_loss, expected) = run_whole(found), run_eager(found)
    assert loss.shape == ()
    assert error(loss, expected_loss) <= 1e-6
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert error(gradient, expected[name]) <= 1e-5, name


def test_infinity_survives_json() -> None:
    graph = capture(Model(lambda m, x: m.map(x).masked_fill(x[:, :1] > 0, float("-inf")).exp().sum()), batch())
    assert msgspec.json.decode(msgspec.json.encode(graph), type=Graph) == graph


def test_the_fingerprint_knows_infinity_from_minus_infinity() -> None:
    filled = [
        Model(lambda m, x, v=v: m.map(x).masked_fill(x[:, :1] > 0, v).exp().sum()) for v in (-torch.inf, torch.inf)
    ]
    assert len({fingerprint(capture(model, batch())) for model in filled}) == 2


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "members", "message"),
    [
        pytest.param(
            lambda m, x: m.map(x), {}, r"(?s)scalar loss.*\[8, 6\].*to do:.*loss=…", id="a loss that is not a scalar"
        ),
        pytest.param(lambda m, x: (m.map(x).sum(),), {}, r"(?s)scalar loss.*tuple.*to do:", id="a loss in a tuple"),
        pytest.param(
            lambda m, x: m.map(x).sum() if m.map(x).sum() > 0 else m.map(x).mean(),
            {},
            r"(?s)Model cannot be captured.*data-dependent.*control flow.*to do:",
            id="control flow on values",
        ),
        pytest.param(
            lambda m, x: m.map(x).sum() * m.map(x).max().item(),
            {},
            r"(?s)aten.item.*depend.* values",
            id="a number read from a tensor",
        ),
        pytest.param(
            lambda m, x: m.map(x)[m.map(x) > 0].sum(),
            {},
            r"(?s)depend.* values",
            id="a shape that depends on values",
        ),
        pytest.param(
            lambda m, x: m.table(x.long().abs()).sum(),
            {"table": nn.Embedding(9, 4, scale_grad_by_freq=True)},
            "scale_grad_by_freq",
            id="gradients scaled by frequency",
        ),
        pytest.param(
            lambda m, x: m.table(x.long().abs()).sum(),
            {"table": nn.Embedding(9, 4, max_norm=1.0)},
            "(?s)max_norm writes into its parameter",
            id="an embedding that is normalized in place",
        ),
        pytest.param(
            lambda m, x: m.table(x.long().abs()).sum(),
            {"table": nn.Embedding(9, 4, sparse=True)},
            "sparse",
            id="sparse gradients",
        ),
        pytest.param(lambda m, x: m.map(x[torch.randperm(8)]).sum(), {}, "(?s)random.*randperm", id="randperm"),
        pytest.param(lambda m, x: (m.map(x) * torch.empty(6).normal_()).sum(), {}, "(?s)random.*normal", id="normal"),
    ],
)
def test_what_cannot_be_captured_says_what_and_what_to_do(
    finish: Callable[..., Any], members: dict[str, Any], message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Model(finish, **members), batch())


def test_a_batch_that_the_model_does_not_take() -> None:
    with pytest.raises(CaptureError, match=r"(?s)Model cannot be captured.*unexpected keyword argument 'y'"):
        capture(Model(lambda m, x: m.map(x).sum()), {"y": torch.zeros(8, 4)})


def test_a_loss_function_makes_a_scalar_of_any_output() -> None:
    graph = capture(Model(lambda m, x: (m.map(x), x)), batch(), loss=lambda output: output[0].pow(2).mean())
    assert graph.tensors[graph.loss].shape == ()


def test_a_view_without_common_factors_cannot_be_split_there() -> None:
    graph = capture(Model(lambda m, x: m.map(x).view(2, 4, 6).view(2, 3, 8).pow(2).sum()), batch())
    (view,) = (op for op in graph.ops if graph.tensors[op.outputs[0]].shape == (2, 3, 8) and "reshape" in op.target)
    assert str(view.rule) == "f0 from1! from2! -> f0 to1! to2!"


# --- random numbers, written buffers, batches ------------------------------------------------------------------------


def test_a_written_buffer_is_a_result() -> None:
    model = Model(lambda m, x: (m.count.add_(1), m.map(x).sum())[1], count=nn.Buffer(torch.zeros(())))
    graph = capture(model, batch())
    assert list(graph.updates) == ["count"]
    assert float(model.count) == 0  # the user's model is as it was


def test_batch_norm_in_training_gives_its_running_statistics() -> None:
    torch.manual_seed(3)
    model = Model(lambda m, x: m.norm(m.map(x)).pow(3).sum(), norm=nn.BatchNorm1d(6))
    graph = capture(model, batch())
    assert set(graph.updates) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = Interpreter(graph, buffers, torch.device("cpu"))(parameters, batch())
    loss.backward()
    expected = model(**batch())
    expected.backward()
    assert error(loss.detach(), expected.detach()) <= 1e-5
    for name, parameter in model.named_parameters():
        assert float((parameters[name].grad - parameter.grad).abs().max()) <= 1e-4, name
    for name, buffer in model.named_buffers():
        assert error(buffers[name].double(), buffer.double()) <= 1e-6, name


def test_dropout_is_a_function_of_seed_step_operator_and_element() -> None:
    model = Model(lambda m, x: (m.drop(torch.ones(64, 64)) * m.drop(torch.ones(64, 64)) * m.map(x).sum()).sum(),
                  drop=nn.Dropout(0.25))  # fmt: skip
    graph = capture(model, batch())
    assert graph.random
    interpreter = Interpreter(graph, {}, torch.device("cpu"))
    parameters = dict(model.named_parameters())

    def loss(seed: int, step: int) -> float:
        return float(interpreter(parameters, batch(), seed=seed, step=step).detach())

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(seed, step) for seed in range(3) for step in range(3)}) == 9
    share = loss(1, 1) / float(model.map(batch()["x"]).sum().detach()) / 64**2
    assert share == pytest.approx(1.0, abs=0.1)  # kept by both with probability 9/16, then scaled by 16/9


@pytest.mark.parametrize("draw", [lambda x: torch.rand_like(x), lambda x: torch.randn(6), lambda x: torch.bernoulli(
    torch.full((6,), 0.5))], ids=["rand_like", "randn", "bernoulli"])  # fmt: skip
def test_random_numbers_are_given_tensors(draw: Callable[[Tensor], Tensor]) -> None:
    graph = capture(Model(lambda m, x: (m.map(x) * draw(m.map(x))).sum()), batch())
    assert graph.random
    assert any(op.target in ("planloom.uniform", "planloom.normal") for op in graph.given)


class Nested(nn.Module):
    """Takes positional, keyword and nested arguments, and a plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 6)

    def forward(self, x: Tensor, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float = 1.0) -> Tensor:
        return (self.map(x) * pair[0] * pair[1]["b"]).sum() * scale


def test_batches_may_be_nested_and_hold_plain_values() -> None:
    x, a, b = torch.randn(8, 4), torch.randn(8, 6), torch.randn(6)
    arguments = {"x": x, "pair": (a, {"b": b}), "scale": 2.0}
    graph = capture(Nested(), arguments)
    assert graph.inputs == ("x", "pair.0", "pair.1.b")
    assert capture_from_spec(Nested(), batch_spec(arguments)) == graph
    assert capture(Nested(), (x, (a, {"b": b}))).inputs == graph.inputs


def test_a_tensor_alone_is_a_batch() -> None:
    model = Model(lambda m, x: m.map(x).sum())
    assert capture(model, batch()["x"]) == capture(model, batch())


def test_errors_name_the_module_and_the_line() -> None:
    with pytest.raises(CaptureError, match=r"(?s)boolean mask.*in the model, File .*test_capture.py.*line \d+"):
        capture(Model(lambda m, x: m.map(x)[x.sum(1) > 0].sum()), batch())


def test_a_branch_on_a_value_names_module_and_line_and_torch_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    model = Model(lambda m, x: m.branch(m.map(x)).sum(), branch=Branch())
    with pytest.raises(CaptureError, match=r"(?s)branch, File .*test_capture.py\", line \d+.*torch.where") as caught:
        capture(model, batch())
    assert "--debug" not in str(caught.value)
    assert "unhinted" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_failure_in_a_layer_of_torchs_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=r"(?s)given:    map, File .*test_capture.py"):
        capture(Model(lambda m, x: m.map(x[:, :3]).sum()), batch())
    assert capfd.readouterr() == ("", "")


def checkpointed(model: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda y: y @ model.map.weight, model.map(x), use_reentrant=True).sum()


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # torch's, of what nn.LSTM does
@pytest.mark.parametrize(
    ("finish", "message"),
    [
        (lambda m, x: m.rnn(x)[0].sum(), r"recurrent layers are not supported: aten.lstm.*rnn, File .*test_capture.py"),
        (lambda m, x: m.map(x).median(-1).values.sum(), r"aten.median.dim has 2 results.*to do:    use sort"),
        (lambda m, x: torch.aminmax(m.map(x), dim=1)[0].sum(), r"has 2 results.*use amin and amax"),
        (without_grad, r"no_grad.*in map, File .*test_capture.py"),
        (checkpointed, r"reentrant.*File .*test_capture.py.*use_reentrant=False"),
    ],
)
def test_refusals_say_what_to_use_instead(finish: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        capture(Model(finish, rnn=nn.LSTM(4, 4)), batch())


def test_a_dict_with_a_loss_is_a_loss() -> None:
    model = Model(lambda m, x: {"loss": m.map(x).sum(), "logits": x})
    assert capture(model, batch()) == capture(Model(lambda m, x: m.map(x).sum()), batch())


def test_arguments_without_names_are_refused() -> None:
    class Star(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return tensors[0].sum()

    with pytest.raises(CaptureError, match=r"(?s)takes \*tensors.*to do:.*wrap the model"):
        capture(Star(), (torch.zeros(2),))


def test_a_spec_keeps_empty_lists_and_dicts() -> None:
    arguments = {"x": torch.zeros(8, 4), "options": {}, "more": {"a": [], "b": ({}, 1)}}
    assert {**arguments_from_spec(batch_spec(arguments)), "x": 0} == {
        "x": 0,
        "options": {},
        "more": {"a": (), "b": ({}, 1)},
    }


def test_the_public_name_is_a_function_even_where_the_package_was_imported_first() -> None:
    import planloom
    import planloom.train

    model = Model(lambda m, x: m.map(x).sum())
    assert planloom.capture(model, batch()) == planloom.capture(model, batch()) == capture(model, batch())


class Called(TorchDispatchMode):
    """Which operators are called, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("case", "slices", "splits"),
    [("chunks", 0, 1), ("three chunks, the last first", 0, 1), ("two of three chunks", 2, 0)],
)
def test_slices_that_are_all_of_a_tensor_are_taken_together(case: str, slices: int, splits: int) -> None:
    """Each slice's cotangent is a whole tensor of zeros: a split's is made once."""
    finish, members = SMALL[case]
    model = Model(finish, **members())
    found = of(model, batch(), find_blocks(capture(model, batch())))
    with Called() as called:
        run_whole(found)
    assert called.names["aten.slice_backward.default"] == slices
    assert called.names["aten.split_with_sizes.default"] == splits
