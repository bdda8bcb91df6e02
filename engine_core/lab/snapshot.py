"""The state of a scheduler as plain data, and back, so that a record can begin in the middle of a run.

`take` walks the objects that a scheduler consists of; `restore` walks a new scheduler of the same
configuration alike and fills it. What is no state stays as it is in the new one: the configuration, the
clock, callbacks. Only classes of the engine's own state (and of the module that a plugged-in scheduler is
from) are walked and made, and none of their code is run, so a snapshot from a stranger can do no harm.

Scalars stand for themselves; anything else is a list that begins with a tag:

    [list, items]  [tuple, items]  [set, items]  [dict, keys, values]  [ordered, keys, values]  [deque, items]
    [bytes, data]  a bytearray                   [array, dtype, shape, data]
    [enum, class, value]                         [object, number, class, names, values]
    [same, number]  an object met before

A tag of a list, dict or ordered dict in capitals says that all its items are scalars.
"""

from __future__ import annotations

import enum
import importlib
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import numpy as np

from engine_core.scheduler.scheduler import Scheduler

_SCALARS = frozenset((int, float, str, bytes, bool, type(None)))
_MODULES = (
    "engine_core.scheduler",
    "engine_core.kv_cache",
    "engine_core.request",
    "engine_core.protocol",
    "engine_core.errors",
    "engine_core.counters",
    "executor.step",
    "executor.sampling_params",
)
_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered"}
_MAKE: dict[str, Any] = {
    **{tag: type_ for type_, tag in _SEQUENCES.items()},
    **{tag: type_ for type_, tag in _MAPPINGS.items()},
}
_FIXED = ("RequestLimits", "History")  # follows from the configuration; decides nothing


class SnapshotError(Exception):
    """A scheduler holds what cannot be written down, or a snapshot does not fit."""


def take(scheduler: Scheduler) -> object:
    """Data for msgpack that shares nothing with the scheduler. Raises `SnapshotError`."""
    return _Taker(scheduler).state


def restore(scheduler: Scheduler, state: object) -> None:
    """Bring a new scheduler, of the same class and configuration, into the state. Raises `SnapshotError`."""
    _Restorer(scheduler, state)


def _modules(scheduler: Scheduler) -> tuple[str, ...]:
    own = next(cls for cls in type(scheduler).__mro__ if cls.__module__ != "engine_core.scheduler.observed")
    return (*_MODULES, own.__module__)


def _attributes(thing: object) -> Iterator[str]:
    """Names of an object's own data, in slots or in its dict."""
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else (name for name in slots if hasattr(thing, name))
    yield from getattr(thing, "__dict__", ())


def _is_walked(thing: object, modules: tuple[str, ...]) -> bool:
    module = type(thing).__module__
    return type(thing).__name__ not in _FIXED and any(
        module == name or module.startswith(name + ".") for name in modules
    )


class _Taker:
    def __init__(self, scheduler: Scheduler) -> None:
        self._modules = _modules(scheduler)
        self._numbers: dict[int, int] = {}  # id of an object met before
        self.state = self._object(scheduler)

    def _object(self, thing: object) -> list[Any]:
        number = self._numbers.get(id(thing))
        if number is not None:
            return ["same", number]
        number = self._numbers[id(thing)] = len(self._numbers)
        if isinstance(thing, msgspec.Struct):
            wanted = list(thing.__struct_fields__)
        else:
            wanted = [name for name in _attributes(thing) if self._is_state(getattr(thing, name))]
        values = [self._value(getattr(thing, name)) for name in wanted]
        return ["object", number, _class_name(type(thing)), wanted, values]

    def _is_state(self, value: object) -> bool:
        """False for what a new scheduler has anyway. What is odd inside a container is an error instead."""
        kind = type(value)
        return (
            kind in _SCALARS
            or kind in _SEQUENCES
            or kind in _MAPPINGS
            or isinstance(value, (bytearray, np.ndarray, np.generic, enum.Enum))
            or _is_walked(value, self._modules)
        )

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind in _SEQUENCES:
            tag = _SEQUENCES[kind]
            if _all_scalars(value):
                return [tag.upper(), list(value)]
            return [tag, [self._value(item) for item in value]]
        if kind in _MAPPINGS:
            tag = _MAPPINGS[kind]
            if _all_scalars(value) and _all_scalars(value.values()):
                return [tag.upper(), list(value), list(value.values())]
            return [tag, [self._value(key) for key in value], [self._value(item) for item in value.values()]]
        if isinstance(value, bytearray):
            return ["bytes", bytes(value)]
        if isinstance(value, (np.ndarray, np.generic)):
            return ["array", value.dtype.str, list(value.shape), value.tobytes()]
        if isinstance(value, enum.Enum):
            return ["enum", _class_name(kind), value.value]
        if _is_walked(value, self._modules):
            return self._object(value)
        raise SnapshotError(
            f"the scheduler holds a {kind.__module__}.{kind.__qualname__}: it is no plain state"
        )


def _all_scalars(items: Collection[object]) -> bool:
    return set(map(type, items)) <= _SCALARS


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


class _Restorer:
    def __init__(self, scheduler: Scheduler, state: Any) -> None:
        self._modules = _modules(scheduler)
        self._objects: dict[int, object] = {}
        try:
            self._fill(scheduler, *state[1:])
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise SnapshotError(f"the state at the record's begin cannot be restored: {error!r}") from error

    def _fill(self, thing: Any, number: int, class_name: str, names: list[str], values: list[Any]) -> None:
        """Give an object its attributes; containers and objects that it has are filled in their place."""
        self._objects[number] = thing
        for name, value in zip(names, values, strict=True):
            current = getattr(thing, name, None)
            if not self._fill_in_place(current, value):
                setattr(thing, name, self._value(value))

    def _fill_in_place(self, current: Any, value: Any) -> bool:
        """Whether `current` could take the value: others may refer to it."""
        if not isinstance(value, list) or current is None:
            return False
        tag = value[0].lower()
        if tag == "object" and _class_name(type(current)) == value[2]:
            if isinstance(current, msgspec.Struct):
                return False
            self._fill(current, *value[1:])
        elif tag in ("list", "deque", "set") and type(current) is _MAKE[tag]:
            new = self._value(value)
            current.clear()
            current.update(new) if tag == "set" else current.extend(new)
        elif tag in ("dict", "ordered") and type(current) is _MAKE[tag]:
            new = self._value(value)
            current.clear()
            current.update(new)
        elif tag == "array" and isinstance(current, np.ndarray) and list(current.shape) == value[2]:
            current[...] = self._value(value)
        else:
            return False
        return True

    def _value(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        tag, *rest = value
        if tag in ("dict", "ordered"):
            return _MAKE[tag](zip(map(self._value, rest[0]), map(self._value, rest[1]), strict=True))
        if tag in ("DICT", "ORDERED"):
            return _MAKE[tag.lower()](zip(rest[0], rest[1], strict=True))
        if tag in _MAKE:
            return _MAKE[tag](map(self._value, rest[0]))
        if tag.lower() in _MAKE:
            return _MAKE[tag.lower()](rest[0])
        if tag == "bytes":
            return bytearray(rest[0])
        if tag == "array":
            array = np.frombuffer(rest[2], np.dtype(rest[0])).reshape(rest[1])
            return array.copy() if rest[1] else array[()]
        if tag == "enum":
            return self._class(rest[0])(rest[1])
        if tag == "same":
            return self._objects[rest[0]]
        if tag == "object":
            return self._new_object(*rest)
        raise SnapshotError(f"the state at the record's begin holds an unknown {tag!r}")

    def _new_object(self, number: int, class_name: str, names: list[str], values: list[Any]) -> object:
        cls = self._class(class_name)
        if issubclass(cls, msgspec.Struct):
            thing = cls(**{name: self._value(value) for name, value in zip(names, values, strict=True)})
            self._objects[number] = thing
        else:
            thing = cls.__new__(cls)
            self._fill(thing, number, class_name, names, values)
        return thing

    def _class(self, name: str) -> Any:
        module, _, qualname = name.partition(":")
        if not any(module == known or module.startswith(known + ".") for known in self._modules):
            raise SnapshotError(f"the state at the record's begin names the foreign class {name}")
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
        if not isinstance(found, type):
            raise SnapshotError(f"the state at the record's begin names {name}, which is no class")
        return found
