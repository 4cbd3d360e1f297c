"""The cache of captured graphs: what comes from a file is what was captured, and only if nothing has changed."""

import importlib.util
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from examples.models.gpt import GPT, GPTConfig, batch_for
from planloom.capture import cache as cache_module
from planloom.capture import capture
from planloom.capture.cache import cached_capture, capture_key
from planloom.errors import CaptureError
from planloom.graph import Graph

CONFIG = GPTConfig(num_layers=2)


def gpt(**changes: Any) -> GPT:
    return GPT(GPTConfig(**{"num_layers": 2, **changes}))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(gpt(), batch_for(CONFIG, 2))


def cached(folder: Path, graph: Graph, model: nn.Module | None = None, batch: Any = None) -> int:
    """How many captures a call of `cached_capture` makes; capturing is replaced by a graph that was captured before."""
    with patch.object(cache_module, "capture", return_value=graph) as captures:
        found = cached_capture(model or gpt(), batch or batch_for(CONFIG, 2), folder=folder)
    assert found == graph
    assert list(found.tensors) == list(graph.tensors)
    return captures.call_count


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_second_call_reads_the_same_graph(tmp_path: Path, graph: Graph) -> None:
    folder = tmp_path / "not" / "there yet"
    assert cached(folder, graph) == 1
    assert cached(folder, graph) == 0
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_a_graph_that_was_used_before_it_is_written(tmp_path: Path, graph: Graph) -> None:
    assert graph.producer  # kept in the graph from now on, but no part of it
    assert graph.given_names
    assert cached(tmp_path, graph) == 1
    assert cached(tmp_path, graph) == 0


def test_a_damaged_file_is_captured_again(tmp_path: Path, graph: Graph) -> None:
    cached(tmp_path, graph)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole.replace(b"linear_0", b"linear_9", 1), b"{}", b"\xff\x00"):
        path.write_bytes(damaged)
        assert cached(tmp_path, graph) == 1
        assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, graph: Graph) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="not kept"):
        assert cached(tmp_path / "file", graph) == 1


def test_several_writers_leave_one_whole_file(tmp_path: Path, graph: Graph) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache_module._write(tmp_path / "key.json", graph), range(16)))
    assert cache_module._read(tmp_path / "key.json") == graph
    assert len(list(tmp_path.iterdir())) == 1


def test_what_json_does_not_give_back_is_not_written(tmp_path: Path, graph: Graph) -> None:
    odd = patch.object(cache_module.msgspec.json, "decode", return_value=None)
    with odd:
        cache_module._write(tmp_path / "key.json", graph)
    assert not list(tmp_path.iterdir())


# --- keys ------------------------------------------------------------------------------------------------------------


def test_the_key_depends_on_the_model_and_the_batch_but_not_on_values() -> None:
    batch = batch_for(CONFIG, 2)
    key = capture_key(gpt(), batch)
    assert key == capture_key(gpt(), batch_for(CONFIG, 2, seed=1))
    with torch.device("meta"):
        assert key == capture_key(gpt(), batch)
    frozen, evaluated, untied, renamed, hooked = gpt(), gpt().eval(), gpt(), gpt(), gpt()
    frozen.norm.weight.requires_grad_(False)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    renamed.layers[1].attention.size = 4
    hooked.norm.register_forward_hook(_double)
    others = [
        capture_key(gpt(num_layers=3), batch),
        capture_key(gpt(hidden=128), batch),
        capture_key(gpt().double(), batch),
        capture_key(frozen, batch),
        capture_key(evaluated, batch),
        capture_key(untied, batch),
        capture_key(renamed, batch),
        capture_key(hooked, batch),
        capture_key(gpt(), batch_for(CONFIG, 4)),
        capture_key(gpt(), batch, _double),
    ]
    assert None not in others
    assert len({key, *others}) == len(others) + 1


def _double(*args: Any) -> Any:
    return args[-1] * 2


def test_losses_are_told_apart_by_text_and_by_what_they_hold() -> None:
    def scaled(factor: float) -> Any:
        return lambda output: output * factor

    model, batch = gpt(), batch_for(CONFIG, 2)
    assert capture_key(model, batch, scaled(2.0)) == capture_key(model, batch, scaled(2.0))
    assert capture_key(model, batch, scaled(2.0)) != capture_key(model, batch, scaled(3.0))
    written = [capture_key(model, batch, eval(f"lambda output: output * {factor}")) for factor in (2, 3)]
    assert None not in written
    assert written[0] != written[1]


def test_what_has_no_description_is_captured_every_time(tmp_path: Path, graph: Graph) -> None:
    model = gpt()
    model.generator = torch.Generator()
    assert capture_key(model, batch_for(CONFIG, 2)) is None
    assert cached(tmp_path, graph, model) == 1
    assert cached(tmp_path, graph, model) == 1
    assert not list(tmp_path.iterdir())


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_the_key_depends_on_the_text_of_the_code_and_of_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    helper, model = tmp_path / "cache_helper.py", tmp_path / "cache_model.py"
    texts = {
        helper: "def act(x):\n    return x.relu()\n",
        model: textwrap.dedent("""
            from torch import nn
            from cache_helper import act

            class Model(nn.Linear):
                def forward(self, x):
                    return act(super().forward(x)).sum()
        """),
    }

    def key() -> str | None:
        for path, text in texts.items():
            path.write_text(text)
            _load(path)
        batch: dict[str, Tensor] = {"x": torch.ones(2, 4)}
        return capture_key(sys.modules["cache_model"].Model(4, 4), batch)

    try:
        keys = [key()]
        texts[helper] = texts[helper].replace("relu", "tanh")
        keys.append(key())
        texts[model] = texts[model].replace(".sum()", ".mean()")
        keys.append(key())
    finally:
        for name in ("cache_helper", "cache_model"):
            sys.modules.pop(name, None)
    assert None not in keys
    assert len(set(keys)) == 3


# --- live code -------------------------------------------------------------------------------------------------------

FACTOR = 2
SETTINGS: dict[str, Any] = {"factor": 2}
OPAQUE: Any = None


class Base(nn.Linear):
    factor = 2

    def scale(self) -> float:
        return 1.0


class Live(Base):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.factor * _factor() * self.scale()).sum()


class Opaque(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if OPAQUE else super().forward(x)


def _factor() -> int:
    return FACTOR * int(SETTINGS["factor"])


def _key(cls: type[nn.Module]) -> str | None:
    return capture_key(cls(4, 4), {"input": torch.ones(2, 4)})


def _closing_over(factor: int) -> type[nn.Module]:
    class Closing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum() * factor

    return Closing


def test_the_key_depends_on_what_a_class_closes_over() -> None:
    keys = [_key(_closing_over(factor)) for factor in (2, 3, 2)]
    assert None not in keys
    assert keys[0] == keys[2] != keys[1]


def test_the_key_depends_on_live_code_attributes_and_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    keys = [_key(Live)]
    assert _key(Live) == keys[0]
    for change in (
        lambda: monkeypatch.setattr(Base, "factor", 3),
        lambda: monkeypatch.setattr(Base, "scale", lambda self: 2.0),
        lambda: monkeypatch.setattr(here, "FACTOR", 3),
        lambda: monkeypatch.setitem(SETTINGS, "factor", 3),
        lambda: monkeypatch.setattr(here, "_factor", lambda: FACTOR + 1),
        lambda: monkeypatch.setattr(Live, "forward", lambda self, x: nn.Linear.forward(self, x).mean()),
        lambda: monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight),
    ):
        change()
        keys.append(_key(Live))
    assert None not in keys
    assert len(set(keys)) == len(keys)


class Importing(Base):
    def forward(self, x: Tensor) -> Tensor:
        import cache_late  # type: ignore[import-not-found]

        return super().forward(x) * cache_late.FACTOR


def test_the_key_depends_on_what_a_function_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [_key(Importing)]
    monkeypatch.syspath_prepend(str(tmp_path))
    for text in ("FACTOR = 2", "FACTOR = 3", "FACTOR = 3; OTHER = 4"):
        (tmp_path / "cache_late.py").write_text(text)
        importlib.invalidate_caches()
        assert _key(Importing) is None  # it is there, and nobody knows what it will be
        _load(tmp_path / "cache_late.py")
        keys.append(_key(Importing))
        sys.modules["cache_late"].FACTOR = 5  # type: ignore[attr-defined]
        keys.append(_key(Importing))
        del sys.modules["cache_late"]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_a_global_without_a_description_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _key(Opaque) is not None
    monkeypatch.setattr(sys.modules[__name__], "OPAQUE", torch.Generator())
    assert _key(Opaque) is None
    assert _key(Live) is not None


def test_a_cached_graph_is_refused_for_a_model_with_hooks(tmp_path: Path, graph: Graph) -> None:
    cached(tmp_path, graph)
    model = gpt()
    model.norm.weight.register_hook(_double)
    with pytest.raises(CaptureError, match=r"norm\.weight"):
        cached(tmp_path, graph, model)


@pytest.mark.slow
def test_the_key_depends_on_patches_of_installed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    llama = sys.modules[transformers.LlamaForCausalLM.__module__]
    settings = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 128}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, use_cache=False))

    def key() -> str | None:
        return capture_key(model, {"input_ids": torch.ones(2, 8, dtype=torch.long)})

    keys = [key()]
    capture(model, {"input_ids": torch.ones(2, 8, dtype=torch.long)}, loss=lambda output: output.logits.sum())
    assert key() == keys[0]
    monkeypatch.setattr(llama, "rotate_half", lambda x: x)
    keys.append(key())
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    keys.append(key())
    monkeypatch.setitem(llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _double)
    keys.append(key())
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_the_key_is_the_same_in_every_process() -> None:
    text = """
        from transformers import LlamaConfig, LlamaForCausalLM
        import torch
        from planloom.capture.cache import capture_key
        settings = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=8, vocab_size=128)
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**settings, use_cache=False))
        print(capture_key(model, {"input_ids": torch.ones(2, 8, dtype=torch.long)}))
    """
    pytest.importorskip("transformers")
    command = [sys.executable, "-c", textwrap.dedent(text)]
    keys = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(keys) == 1
    assert keys != {"None\n"}
