"""The engine's options on the command line, made from the fields of `EngineConfig`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, get_args, get_origin

import msgspec

from engine_core.cli.messages import say
from engine_core.cli.parser import Parser, integer, key_value
from engine_core.config import ConfigError, EngineConfig, field_types, literal_choices

_SHORT = {"tensor_parallel_size": "-tp"}

# Options of the mock worker that have a flag of their own: name in `worker_options`, type, help.
_MOCK_OPTIONS: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("mock_step_ms", float, "time that every step takes"),
    ("mock_prefill_us_per_token", float, "time for each prompt token of a step"),
    ("mock_decode_us_per_seq", float, "time for each request that decodes in a step"),
    ("mock_jitter", float, "share by which these times vary at random"),
    ("mock_seed", integer, "seed of that jitter"),
    ("mock_num_blocks", integer, "KV blocks that the mock has room for"),
    ("mock_max_model_len", integer, "longest sequence that the mock allows"),
    ("vocab_size", integer, "tokens in the mock's vocabulary"),
)


def flag(field: str) -> str:
    """The flag of a field of `EngineConfig`, as it is set to something other than its default."""
    if field == "log_stats":  # vLLM's name
        return "--disable-log-stats"
    if field == "worker_options":
        return "--worker-option"
    return "--" + field.replace("_", "-")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field. Those that are not given leave nothing in the namespace."""
    section = parser.add_argument_group("Engine")
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    for name, type_ in field_types().items():
        meta = next((part for part in get_args(type_)[1:] if isinstance(part, msgspec.Meta)), msgspec.Meta())
        if meta.title:
            section = parser.add_argument_group(meta.title)
        help_ = (meta.description or "").replace("%", "%%")
        default = defaults[name]
        if default not in (None, "", msgspec.NODEFAULT) and not isinstance(default, bool):
            help_ += f" (default: {default})"
        _add(section, name, _plain(type_), help_, default)
    mock = parser.add_argument_group("Mock worker")
    for name, parse, help_ in _MOCK_OPTIONS:
        mock.add_argument(
            flag(name), dest=f"mock:{name}", type=parse, metavar="N", default=argparse.SUPPRESS, help=help_
        )


def _add(section: argparse._ArgumentGroup, name: str, type_: Any, help_: str, default: object) -> None:
    kwargs: dict[str, Any] = {"dest": f"engine:{name}", "default": argparse.SUPPRESS, "help": help_}
    if name == "worker_options":
        section.add_argument(flag(name), action="append", type=key_value, metavar="NAME=VALUE", **kwargs)
    elif name == "log_stats":
        kwargs["help"] = "do not " + help_
        section.add_argument(flag(name), action="store_false", **kwargs)
    elif type_ is bool:
        kwargs["help"] += f" (default: {'on' if default else 'off'})"
        section.add_argument(flag(name), action=argparse.BooleanOptionalAction, **kwargs)
    else:
        names = [*([_SHORT[name]] if name in _SHORT else []), flag(name)]
        choices = literal_choices(type_)
        if choices:
            section.add_argument(*names, choices=choices, **kwargs)
        else:
            parsers: dict[Any, Callable[[str], Any]] = {int: integer, float: float}
            parse = _model_len if name == "max_model_len" else parsers.get(type_, str)
            if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
                parse = partial(_from_json, type_)
            section.add_argument(
                *names, type=parse, metavar="N" if type_ in (int, float) else "NAME", **kwargs
            )


def _model_len(text: str) -> int | None:
    """vLLM's "auto" and -1: as long as the model allows."""
    return None if text in ("auto", "-1") else integer(text)


def _from_json(type_: type[msgspec.Struct], text: str) -> msgspec.Struct:
    try:
        return msgspec.json.decode(text, type=type_)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).replace('`', '')}") from None


def _plain(type_: Any) -> Any:
    """The type without `Annotated` and None."""
    if get_origin(type_) is Annotated:
        return _plain(get_args(type_)[0])
    parts = [part for part in get_args(type_) if part is not type(None)]
    if len(parts) == 1 and type(None) in get_args(type_):
        return _plain(parts[0])
    return type_


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EngineConfig` that the command line set."""
    values = {
        key.removeprefix("engine:"): value for key, value in vars(args).items() if key.startswith("engine:")
    }
    mock = {key.removeprefix("mock:"): value for key, value in vars(args).items() if key.startswith("mock:")}
    if mock or "worker_options" in values:
        values["worker_options"] = {**mock, **dict(values.get("worker_options", ()))}
    return values


def engine_config(parser: Parser, args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The configuration that the command line asks for; `defaults` replace the fields' own.

    A bad value is a usage error.
    """
    values = {**defaults, **given(args)}
    if getattr(args, "connect", None) is not None and (unused := given(args).keys() - {"model"}):
        say(f"{parser.prog}: {', '.join(sorted(map(flag, unused)))}: not for the engine that runs already")
    if "worker_options" in defaults:
        values["worker_options"] = {**defaults["worker_options"], **given(args).get("worker_options", {})}
    config = EngineConfig(**values)
    try:
        config.validate()
    except ConfigError as error:
        parser.error(f"{flag(error.field)} {error.value}: {error.reason}")
    return config
