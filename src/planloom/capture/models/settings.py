"""Settings of a model by name, overridden by a query: `num_hidden_layers=4&seq=4096&vision_config.image_size=448`.

`batch`, `seq` (tokens in a sample) and `dtype` are settings of every model; any other is one of its configuration, also
by Hugging Face's common names (`num_hidden_layers` where the class says `n_layer`) and inside its parts. A value must
have the type of the value that it replaces; lists are separated by commas; `none` is None. A number of layers changes
what is listed by layer, and the decoder with the encoder. What follows from other settings cannot be overridden.
"""

import copy
import dataclasses
import difflib
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from planloom.errors import CaptureError

DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYERS = "num_hidden_layers"
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
NOT_OF_THE_USER = ("model_type", "architectures", "transformers_version")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be built: the batch's sizes, the dtype, and overrides of the configuration, still as text."""

    name: str
    batch: int
    seq: int | None
    dtype: str
    settings: Mapping[str, str]


def read_request(name: str, query: str, *, batch: int, seq: int | None, dtype: str) -> Request:
    """The query over these defaults; `seq` is None where samples have no sequence."""
    try:
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        what = f"the overrides of {name} cannot be read"
        raise CaptureError(what, given=query, required="key=value&key=value") from error
    settings = dict(pairs)
    if len(settings) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise CaptureError(f"overrides of {name} are given twice", given=", ".join(twice), required="each once")
    if seq is None and "seq" in settings:
        raise CaptureError(f"a sample of {name} has no sequence", given=f"seq={settings['seq']}", required="no seq")
    if (dtype := settings.pop("dtype", dtype)) not in DTYPES:
        raise CaptureError(f"{name} cannot be built in this dtype", given=dtype, required=f"one of {', '.join(DTYPES)}")
    return Request(
        name=name,
        batch=_read_size(settings, "batch", batch, name),
        seq=None if seq is None else _read_size(settings, "seq", seq, name),
        dtype=dtype,
        settings=settings,
    )


def _read_size(settings: dict[str, str], key: str, default: int, name: str) -> int:
    text = settings.pop(key, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise CaptureError(f"{key} of {name} is no size", given=text, required="a whole number from 1")
    return int(text)


def parse_value(text: str, present: Any, *, key: str, name: str) -> Any:
    """A value of the type of the present one."""
    if text.lower() in ("none", "null"):
        return None
    if isinstance(present, list | tuple):
        first = present[0] if present else None
        return [parse_value(part, first, key=key, name=name) for part in text.split(",")]
    if present is None:
        return _literal(text)
    if isinstance(present, str):
        return text
    try:
        if isinstance(present, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(present, int | float):
            return type(present)(text)
    except (ValueError, KeyError) as error:
        required = f"{type(present).__name__}, as in {key}={str(present).lower()}"
        raise CaptureError(f"{key} of {name} has the wrong type", given=text, required=required) from error
    raise CaptureError(
        f"{key} of {name} cannot be overridden",
        given=f"{key}={text}",
        required="a setting that is a number, a text, true or false, or a list of such",
        todo="write it into a config.json and name that file",
    )


def _literal(text: str) -> Any:
    """A number, true or false if it reads like one, else the text: where the present value, None, tells no type."""
    try:
        value = json.loads(text.lower())
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def unknown_setting(key: str, known: list[str], name: str) -> CaptureError:
    """The error for a setting that there is not, with those that it may have meant."""
    known = sorted({"batch", "seq", "dtype", *known})
    inside_parts = [other for other in known if other.rpartition(".")[2] == key]  # image_size: vision_config.image_size
    near = inside_parts + [other for other in difflib.get_close_matches(key, known, n=5) if other not in inside_parts]
    return CaptureError(
        f"{name} has no setting {key!r}",
        given=key,
        required=f"one of its settings, as {', '.join(near)}" if near else f"one of {', '.join(known)}",
    )


def configured(request: Request, config_class: Any, arguments: Mapping[str, Any]) -> Any:
    """The configuration of transformers with all overrides, made anew so that what follows from them follows."""
    arguments = dict(copy.deepcopy(arguments))
    present = _made(request, config_class, arguments)
    if hasattr(present, "use_cache"):
        arguments["use_cache"] = False
    # The number of layers comes first, because it also sets what others may set otherwise.
    for key, text in sorted(request.settings.items(), key=lambda item: not item[0].endswith(LAYERS)):
        _override(arguments, present, key, text, request.name)
    return _made(request, config_class, arguments)


def _made(request: Request, config_class: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        return config_class.from_dict(copy.deepcopy(arguments))
    except Exception as error:  # the strict dataclasses of transformers raise types of their own
        raise refused(request, error) from error


def refused(request: Request, error: Exception) -> CaptureError:
    """The error for settings that transformers refuses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    overrides = "&".join(f"{key}={text}" for key, text in request.settings.items())
    return CaptureError(
        f"{request.name} cannot be built{' with these overrides' if overrides else ''}",
        given=overrides,
        required=f"settings that fit together ({type(error).__name__}: {' '.join(lines)})",
    )


def _override(arguments: dict[str, Any], config: Any, key: str, text: str, name: str) -> None:
    """Write one override into the arguments of a configuration, of which `config` is the present value."""
    if key not in (known := _known_settings(config)):
        raise unknown_setting(key, known, name)
    *parts, last = key.split(".")
    for part in parts:
        arguments[part] = dict(arguments.get(part) or {})
        arguments, config = arguments[part], getattr(config, part)
    real = config.attribute_map.get(last, last)
    aliases = {last, real, *(alias for alias, meant in config.attribute_map.items() if meant == real)}
    fields = {field.name for field in dataclasses.fields(config)} | {"num_labels"}
    if not aliases & (fields | set(arguments)):
        raise CaptureError(
            f"{key} of {name} cannot be overridden",
            given=f"{key}={text}",
            required=f"{getattr(config, last)}, which follows from other settings",
        )
    value = parse_value(text, getattr(config, last), key=key, name=name)
    if LAYERS in aliases:
        if not isinstance(value, int) or value < 1:
            raise CaptureError(f"{name} has no layers", given=f"{key}={text}", required="a whole number from 1")
        _resize_lists(arguments, config, value, name)
    if last == LAYERS:
        arguments.update({decoder: value for decoder in DECODER_LAYERS if hasattr(config, decoder)})
    if last == "num_labels":
        aliases |= {"id2label", "label2id"}
    for alias in aliases:
        arguments.pop(alias, None)
    arguments[real] = value


def _resize_lists(arguments: dict[str, Any], config: Any, num_layers: int, name: str) -> None:
    """Shorten what is listed by layer, or go on with its pattern."""
    old = config.num_hidden_layers
    listings = {k: v for k, v in arguments.items() if isinstance(v, list) and len(v) == old}
    for key, listed in listings.items():
        period = next(p for p in range(1, old + 1) if all(listed[i] == listed[i - p] for i in range(p, old)))
        if num_layers > old and 2 * period > old:
            raise CaptureError(
                f"{key} of {name} lists {old} layers without a pattern",
                given=f"{LAYERS}={num_layers}",
                required=f"at most {old}",
            )
        arguments[key] = [listed[i if i < old else i % period] for i in range(num_layers)]


def _known_settings(config: Any) -> list[str]:
    names = [*config.to_dict(), *config.attribute_map, "num_labels"]
    for part in config.sub_configs:
        if (inner := getattr(config, part)) is not None:
            names += [f"{part}.{name}" for name in _known_settings(inner)]
    return [name for name in names if not name.startswith("_") and name not in NOT_OF_THE_USER]
