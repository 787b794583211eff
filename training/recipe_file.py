"""Frozen dataclasses from YAML and a command line, and back; what does not fit is refused by its dotted name."""

import dataclasses
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml


# YAML 1.1, which PyYAML reads, takes 1e9 and 3e-4 for text: it wants a dot and a sign.
EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
WRONG = object()
UNIONS = (Union, types.UnionType)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"{name}: expected once, got {names.count(name)} times", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """The value that `text` holds. Raises ValueError, naming `source` and the line, if it is not YAML or a name comes
    twice."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: expected YAML, got {error}") from error


def to_yaml(value: Any) -> str:
    """A dataclass as YAML that `parse_yaml` and `build` turn into an equal one."""
    return yaml.dump(dataclasses.asdict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def override(tree: dict[str, Any], words: Sequence[str]) -> None:
    """Changes `tree` by a command line: `--a.b value`, `--a.b=value`, `--a.0.b value`; several words are a list, none
    is true. Values are YAML. Raises ValueError, naming the option, where there is nothing to change."""
    for option, values in _options(words):
        parsed = [parse_yaml(value, f"--{option}") for value in values]
        _assign(tree, option, parsed[0] if len(parsed) == 1 else parsed or True)


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    option: tuple[str, list[str]] | None = None
    for word in words:
        if word.startswith("--"):
            if option is not None:
                yield option
            name, given, value = word[2:].partition("=")
            option = name, [value] if given else []
        elif option is None:
            raise ValueError(f"overrides: expected --NAME before a value, got {word!r}")
        else:
            option[1].append(word)
    if option is not None:
        yield option


def _assign(tree: Any, name: str, value: Any) -> None:
    keys = name.split(".")
    for depth, key in enumerate(keys):
        above, last = ".".join(keys[:depth]), depth == len(keys) - 1
        match tree:
            case dict():
                if not last and tree.get(key) is None:
                    tree[key] = {}
            case list():
                if not key.isdecimal() or int(key) >= len(tree):
                    where = f"after {above!r}" if above else "first"
                    raise ValueError(f"{name}: expected a number below {len(tree)} {where}, got {key!r}")
                key = int(key)
            case _:
                raise ValueError(f"{name}: expected a field, but {above or 'the recipe'} is {tree!r}")
        if last:
            tree[key] = value
        tree = tree[key]


def build(kind: Any, tree: Any) -> Any:
    """The dataclass `kind` from what YAML holds: nested dataclasses, `X | None`, `Literal`, `tuple` and `dict` of these.

    Whole numbers may be written as floats (1e9). Raises ValueError that lists, one a line, every unknown, missing or
    wrongly typed field; if there is none, what the constructors raise.
    """
    problems: list[str] = []
    built = _read(kind, tree, "", problems)
    if problems:
        raise ValueError("\n".join(problems))
    return built


def _read(kind: Any, value: Any, name: str, problems: list[str]) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in UNIONS and value is not None:
        nested = [one for one in arguments if dataclasses.is_dataclass(one) or get_origin(one) in (tuple, dict)]
        if nested:
            return _read(nested[0], value, name, problems)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, name, problems)
    if kind == tuple[str, ...] and isinstance(value, str):
        value = [value]  # on a command line, one word of a list looks like a word
    if origin is tuple and isinstance(value, (list, tuple)) and (arguments[1] is ... or len(arguments) == len(value)):
        kinds = [arguments[0]] * len(value) if arguments[1] is ... else arguments
        return tuple(
            _read(one, item, _dotted(name, number), problems)
            for number, (one, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict and isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                problems.append(f"{name}: expected names that are text, got {key!r}")
        return {key: _read(arguments[1], item, _dotted(name, key), problems) for key, item in value.items()}
    converted = _convert(kind, value)
    if converted is WRONG:
        problems.append(f"{name}: expected {_described(kind)}, got {value!r}")
    return converted


def _read_dataclass(kind: Any, value: Any, name: str, problems: list[str]) -> Any:
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        problems.append(f"{name or 'recipe'}: expected {_described(kind)}, got {value!r}")
        return WRONG
    before, kinds, read = len(problems), get_type_hints(kind), {}
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            problems.append(
                f"{_dotted(name, key)}: expected one of the fields {', '.join(fields)}, got an unknown one"
            )
    for field in fields.values():
        if field.name in value:
            read[field.name] = _read(kinds[field.name], value[field.name], _dotted(name, field.name), problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{_dotted(name, field.name)}: expected {_described(kinds[field.name])}, got nothing")
    if len(problems) > before:
        return WRONG
    try:
        return kind(**read)
    except ValueError as error:
        problems.append(_dotted(name, str(error)))
        return WRONG


def _convert(kind: Any, value: Any) -> Any:
    """`value` as a `kind` that holds no others; WRONG if it is none."""
    if get_origin(kind) in UNIONS:
        found = [one for one in (_convert(other, value) for other in get_args(kind)) if one is not WRONG]
        return found[0] if found else WRONG
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else WRONG
    if kind is Any:
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is float and number:
        return float(value)
    if kind is int and number and value == int(value):
        return int(value)
    return value if kind in (str, bool, type(None)) and type(value) is kind else WRONG


def _described(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in UNIONS:
        return " or ".join("null" if one is type(None) else _described(one) for one in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is tuple:
        return "a list" if arguments[1] is ... else f"a list of {len(arguments)}"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a mapping"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "a value")


def _dotted(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
