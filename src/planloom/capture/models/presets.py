"""Models by name, and Hugging Face configurations, built on the `meta` device with a batch for their training loss.

    llama3-8b?num_hidden_layers=4&seq=4096&batch=8
    path/to/config.json?batch=8

Nothing is initialized, allocated or fetched, unless another device is named: then weights are the model's initial ones
and the batch is random. What each name means is in `planloom.graph.catalog`, what may stand after the question mark in
`settings`. The class of a `config.json` is the first of its `architectures`, else the one for its `model_type`; the
batch follows from the class. Models are in training mode, with their dropout.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from planloom.capture.models.evoformer import NUM_TOKENS, Evoformer, EvoformerConfig
from planloom.capture.models.settings import Request, configured, parse_value, read_request, refused, unknown_setting
from planloom.errors import CaptureError
from planloom.graph.catalog import model_preset

DEFAULT_BATCH = 8  # of a config.json
DEFAULT_SEQ = 2048  # of a config.json, if its positions reach so far
HEADS_IN_ORDER = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",  # after masked: it also has the decoders that some encoders can be made to be
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
)
OWN_FACTORY = "write a file.py with a factory() that returns (model, batch)"

Built = tuple[nn.Module, dict[str, Any]]


def build_preset(name: str, query: str = "", device: str = "meta") -> Built:
    """The preset of that name with the overrides of the query, and its batch."""
    preset = model_preset(name)
    request = read_request(name, query, batch=preset.batch, seq=preset.seq, dtype=preset.dtype)
    if preset.model == Evoformer.__name__:
        return _build_evoformer(request, preset.config, device)
    return _build(request, getattr(_transformers(), preset.model), preset.config, device)


def build_config_file(path: Path, query: str = "", device: str = "meta") -> Built:
    """The model of a Hugging Face `config.json` with the overrides of the query, and a batch."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path} cannot be read", given=str(error), required="a Hugging Face config.json") from error
    if not isinstance(document, dict):
        raise CaptureError(f"{path} is no configuration", given=type(document).__name__, required="a JSON object")
    model_class = _class_of(document, path)
    seq = None if _takes_images_only(model_class) else DEFAULT_SEQ
    dtype = str(document.get("dtype") or document.get("torch_dtype") or "float32")
    request = read_request(str(path), query, batch=DEFAULT_BATCH, seq=seq, dtype=dtype)
    if seq is not None and request.seq == seq:
        limit = _num_positions(configured(request, model_class.config_class, document))
        request = dataclasses.replace(request, seq=min(seq, limit or seq))
    return _build(request, model_class, document, device)


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise CaptureError(
            "models of Hugging Face need the package transformers",
            given=str(error),
            required="transformers, installed",
            todo="pip install 'planloom[models]'",
        ) from error
    return transformers


def _class_of(document: Mapping[str, Any], path: Path) -> Any:
    transformers = _transformers()
    for name in document.get("architectures") or ():
        if hasattr(found := getattr(transformers, name, None), "config_class"):
            return found
    model_type = document.get("model_type", "")
    if model_type in transformers.CONFIG_MAPPING:
        config_class = transformers.CONFIG_MAPPING[model_type]
        for mapping in (getattr(transformers, head) for head in HEADS_IN_ORDER):
            if config_class in mapping:
                return mapping[config_class]
    raise CaptureError(
        f"{path} names no model of transformers {transformers.__version__}",
        given=f"architectures {document.get('architectures')}, model_type {model_type!r}",
        required="a class of transformers, or the type of a language model or image classifier",
        todo=OWN_FACTORY,
    )


def _build(request: Request, model_class: Any, arguments: Mapping[str, Any], device: str) -> Built:
    config = configured(request, model_class.config_class, arguments)
    inputs = _inputs(request, model_class, config)
    try:
        with torch.device(device), _default_dtype(request.dtype):
            model = model_class(config)
    except Exception as error:  # sizes that do not fit are refused in many ways; each is the user's to repair
        raise refused(request, error) from error
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning, for GPT2LMHeadModel
    words = getattr(config, "text_config", config)
    below = config.num_labels if _takes_images_only(model_class) else words.vocab_size
    return model, _on(device, inputs, below)


def _on(device: str, batch: dict[str, Any], below: int) -> dict[str, Any]:
    """The batch on a device: on `meta` as it is, elsewhere with random whole numbers below a limit, or normal ones."""
    if device == "meta":
        return batch
    filled = dict(batch)
    for name, leaf in batch.items():
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            filled[name] = torch.randn(leaf.shape, dtype=leaf.dtype, device=device)
        elif isinstance(leaf, Tensor):
            filled[name] = torch.randint(below, leaf.shape, device=device)
    return filled


def _build_evoformer(request: Request, arguments: Mapping[str, Any], device: str) -> Built:
    assert request.seq is not None
    config = EvoformerConfig(**arguments, num_residues=request.seq)
    known = [field.name for field in dataclasses.fields(config) if field.name != "num_residues"]
    for key, text in request.settings.items():
        if key not in known:
            raise unknown_setting(key, known, request.name)
        value = parse_value(text, getattr(config, key), key=key, name=request.name)
        config = dataclasses.replace(config, **{key: value})
    with torch.device(device), _default_dtype(request.dtype):
        model = Evoformer(config)
    sequences, residues = config.num_sequences, config.num_residues
    inputs = {
        "msa": _integers(request.batch, sequences, residues),
        "msa_labels": _integers(request.batch, sequences, residues),
        "distances": _integers(request.batch, residues, residues),
    }
    return model, _on(device, inputs, NUM_TOKENS)


@contextmanager
def _default_dtype(name: str) -> Iterator[None]:
    """Parameters get this dtype; what a model makes in float32 on purpose, as rotary frequencies, keeps it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _takes_images_only(model_class: Any) -> bool:
    return model_class.__name__.endswith("ForImageClassification")


def _inputs(request: Request, model_class: Any, config: Any) -> dict[str, Any]:
    """What the class takes in training: `meta` tensors, and the flag without which CLIP returns no loss."""
    name = model_class.__name__
    if _takes_images_only(model_class):
        return {"pixel_values": _images(request, config), "labels": _integers(request.batch)}
    tokens = _integers(request.batch, _fitting_seq(request, config))
    if name == "CLIPModel":
        return {"input_ids": tokens, "pixel_values": _images(request, config.vision_config), "return_loss": True}
    if config.is_encoder_decoder and name.endswith("ForConditionalGeneration"):
        return {"input_ids": tokens, "decoder_input_ids": tokens.clone(), "labels": tokens.clone()}
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        return {"input_ids": tokens, "labels": tokens.clone()}
    raise CaptureError(
        f"no training batch is known for {name}",
        given=request.name,
        required="a language model (…ForCausalLM, …LMHeadModel, …ForMaskedLM), an encoder and decoder "
        "(…ForConditionalGeneration), …ForImageClassification or CLIPModel",
        todo=OWN_FACTORY,
    )


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _images(request: Request, config: Any) -> Tensor:
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (request.batch, config.num_channels, height, width)
    return torch.empty(shape, dtype=getattr(torch, request.dtype), device="meta")


def _num_positions(config: Any) -> int | None:
    return getattr(getattr(config, "text_config", config), "max_position_embeddings", None)


def _fitting_seq(request: Request, config: Any) -> int:
    seq, limit = request.seq, _num_positions(config)
    assert seq is not None
    if limit is not None and seq > limit:
        part = "text_config." if hasattr(config, "text_config") else ""
        raise CaptureError(
            f"{request.name} has no positions for so long a sequence",
            given=f"seq={seq}",
            required=f"at most {limit}",
            todo=f"add {part}max_position_embeddings={seq}",
        )
    return seq
