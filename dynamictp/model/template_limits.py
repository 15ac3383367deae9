"""A sandboxed Jinja environment in which a template can use up neither the processor nor the memory.

Jinja's sandbox keeps templates away from Python's insides; it does not stop endless loops or strings that
double. Here every render has a budget of steps (loop turns, calls, filters) and of text (characters that
outputs, operators, filters and calls make). Both are counted, not timed: the same template and messages end
the same way always. What could make much at once (`'x' * 10**9`, a width in a format) is measured first.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 500_000
"""About a second. A long conversation takes some ten steps a message."""
MAX_TEXT = 32 << 20
"""Characters. The context of no model comes near; nor does a body of the API, a few times over."""
MAX_SIZE_ARGUMENT = 10_000
"""Largest width, indent or count that a template may ask for."""
MAX_NUMBER_BITS = 1 << 13
_CALL = 4
"""Steps that a call counts as."""
_CONTAINERS = (list, tuple, dict)
_ITEM = 8
_SCALAR = 16
"""Characters that an item of a list and a number or other value count as."""
_SIZED = ("center", "indent", "wordwrap", "batch", "slice", "tojson", "truncate", "urlize", "round", "format")
_TURN, _CONCATENATE, _CONTAINER = " turn", " concatenate", " container"
_WIDTH = re.compile(r"\d{5}")
_TAKEN_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")


class TemplateLimit(jinja2.TemplateError):
    """The template needs more steps or text than any sound one."""


class _Budget:
    """What a render has left."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.text = MAX_TEXT

    def spend(self, steps: int, text: int = 0) -> None:
        # Handling a megabyte takes about as long as a thousand steps.
        self.steps -= steps + (text >> 10)
        self.text -= text
        if self.steps < 0:
            raise TemplateLimit(f"it takes more than {MAX_STEPS} steps")
        if self.text < 0:
            raise TemplateLimit(f"it makes more than {MAX_TEXT} characters")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that count what they do; `render` gives each run a new budget. Thread-safe."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """`filters` are added to Jinja's own; `options` are the base class's."""
        super().__init__(finalize=self._output, **options)
        self._running = threading.local()
        # Random filler, and text whose size nobody can tell beforehand: no prompt is made of them.
        del self.globals["lipsum"], self.filters["pprint"]
        for name, function in {**self.filters, **filters}.items():
            self.filters[name] = self._measured(name, function)
        # `_parse` puts these into the tree. Filters are called without a detour, and no template can write
        # these names. What is given the context is not folded at compile time.
        self.filters[_TURN] = jinja2.pass_context(lambda context, constant: self.spend(1, constant))
        self.filters[_CONCATENATE] = self._concatenate
        self.filters[_CONTAINER] = self._container

    def render(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """The text of one run. Raises `jinja2.TemplateError`, of which `TemplateLimit` is one."""
        self._running.budget = _Budget()
        try:
            return template.render(values)
        finally:
            del self._running.budget

    def spend(self, steps: int, text: int = 0) -> None:
        """Take steps and characters from the budget of this thread's run. Raises `TemplateLimit`."""
        # Constants are folded when a template is compiled, which is no run.
        budget = getattr(self._running, "budget", None) or _Budget()
        budget.spend(steps, text)

    def _concatenate(self, parts: list[Any]) -> str:
        """The `~` operator."""
        self._spend_size(parts)
        return "".join(map(str, parts))

    def _container(self, value: Any) -> Any:
        """A list, tuple or mapping that was just made: pays for all that is in it, however deep.

        Else one that holds another twice, and so on, would be small and take forever to compare or hash.
        """
        pending = [value]
        while pending:
            inner = pending.pop()
            self.spend(1 + (len(inner) >> 6))
            items = [item for pair in inner.items() for item in pair] if isinstance(inner, dict) else inner
            pending += [item for item in items if isinstance(item, _CONTAINERS)]
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, (str, bytes)):
            self._check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                self._check_bits(left.bit_length() * max(right, 0))
        elif isinstance(left, Sized) and isinstance(right, Sized):
            self.spend(1, self._length(left) + self._length(right))
        result = super().call_binop(context, operator, left, right)
        return self._container(result) if operator == "*" and isinstance(result, (list, tuple)) else result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The names are the base class's: keyword arguments of templates must not meet them.
        __self.spend(_CALL)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes)):
            __self._check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (str, bytes, list, tuple)):
            __self.spend(0, __self._length(result))
        # `dict(a=x, b=x)` makes one as `{"a": x, "b": x}` does.
        return __self._container(result) if __obj is dict else result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        sandboxed = super().wrap_str_format(value)
        if sandboxed is None:
            return None

        @wraps(sandboxed)
        def measured(*args: Any, **kwargs: Any) -> str:
            self._check_method(value.__self__, value.__name__, args, kwargs)
            return sandboxed(*args, **kwargs)

        return measured

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree, with counters in loops and macros, and `~` as a call."""
        tree = super()._parse(source, name, filename)
        bodies: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
            *tree.find_all(nodes.CallBlock),
        ]
        for body in bodies:
            constant = sum(
                len(data.data) for child in body.body for data in child.find_all(nodes.TemplateData)
            )
            body.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(constant), _TURN)))
        _rewrite(tree, _measured_node)
        tree.set_environment(self)
        tree.set_lineno(1)
        return tree

    def _output(self, value: Any) -> Any:
        """Every value that a template writes."""
        self._spend_size((value,))
        return value

    def _measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays for what it is given and for what it makes."""
        # The first arguments are the context or environment where the filter wants one.
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            value, *more = args[skipped:]
            self.spend(1, self._length(value))
            if name in _SIZED:
                self._check_sizes((*more, *kwargs.values()))
            if name in ("join", "sum"):
                value = list(value)
            self._check_filter(name, value, more, kwargs)
            result = function(*args[:skipped], value, *more, **kwargs)
            if isinstance(result, (str, bytes, list, tuple)):
                self.spend(0, self._length(result))
            return result

        return measured

    def _check_filter(self, name: str, value: Any, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        given = (*args, *kwargs.values())
        if name in _SIZED:
            self._check_sizes(given)
        match name:
            case "tojson":
                self._spend_size((value,), indent=max([0, *map(self._extent, given)]))
            case "string" | "escape" | "e" | "forceescape" | "urlencode" | "xmlattr":
                self._spend_size((value,))
            case "format":
                self._check_format(value, given)
            case "sum":
                # Lists are added one by one, each time into a new one.
                total = sum(map(self._length, value))
                self.spend(1 + (len(value) * total >> 10), total)
            case "replace":
                self._check_replace(str(value), *[str(argument) for argument in args[:2]])
            case "list" | "sort" | "unique" | "batch" | "slice":
                self.spend(1, _ITEM * len(value) if isinstance(value, str) else 0)
            case "join":
                self._check_join(args[0] if args else kwargs.get("d", ""), value)
            case "indent":
                self.spend(1, (str(value).count("\n") + 1) * max([4, *map(self._extent, given)]))
            case "wordwrap":
                self.spend(1, len(value) * max([1, *(len(text) for text in given if isinstance(text, str))]))

    def _check_method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a method of the text or bytes `owner`."""
        given = (*args, *kwargs.values())
        self.spend(1 + (len(owner) >> 10))
        match name:
            case "center" | "ljust" | "rjust" | "zfill" | "expandtabs":
                self._check_sizes(given)
                self.spend(
                    0, (len(owner) if name == "expandtabs" else 1) * max([8, *map(self._extent, given)])
                )
            case "format" | "format_map":
                named = name == "format_map" and given and isinstance(given[0], Mapping)
                self._check_format(owner, tuple(given[0].values()) if named else given)
            case "replace":
                self._check_replace(owner, *args[:2])
            case "join" if args:
                if not isinstance(args[0], Sized):
                    raise TemplateLimit("join is given something without a length; make it a list first")
                self._check_join(owner, args[0])
            case "split" | "rsplit" | "splitlines":
                separator = args[0] if args and type(args[0]) is type(owner) and args[0] else None
                self.spend(0, _ITEM * (len(owner) // 2 if separator is None else owner.count(separator)))
            case "translate" if args and isinstance(args[0], Mapping):
                self.spend(0, len(owner) * max([1, *map(self._extent, args[0].values())]))

    def _check_sizes(self, arguments: Iterable[Any]) -> None:
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > MAX_SIZE_ARGUMENT:
                raise TemplateLimit(f"a width or count above {MAX_SIZE_ARGUMENT}")

    def _check_format(self, pattern: Any, arguments: tuple[Any, ...]) -> None:
        text = pattern.decode("latin-1") if isinstance(pattern, bytes) else str(pattern)
        if _WIDTH.search(text):
            raise TemplateLimit(f"a width above {MAX_SIZE_ARGUMENT} in a format")
        if _TAKEN_WIDTH.search(text):
            self._check_sizes(arguments)
            self.spend(1, text.count("%") * MAX_SIZE_ARGUMENT)
        widths = sum(map(int, re.findall(r"\d+", text)))
        # An argument may be named again and again.
        places = text.count("%") + text.count("{")
        self.spend(1, widths + places * self._spend_size(arguments))

    def _check_replace(self, owner: Any, old: Any = "", new: Any = "") -> None:
        if type(old) is type(new) is type(owner):
            self.spend(1, len(owner) + owner.count(old) * max(0, len(new) - len(old)))

    def _check_join(self, separator: Any, items: Any) -> None:
        self.spend(1, len(items) * self._extent(separator))
        self._spend_size(items)

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() + right.bit_length())
        elif isinstance(right, int):
            self.spend(1, self._length(left) * max(0, right))
        elif isinstance(left, int):
            self.spend(1, self._length(right) * max(0, left))

    @staticmethod
    def _check_bits(bits: int) -> None:
        if bits > MAX_NUMBER_BITS:
            raise TemplateLimit(f"a number of more than {MAX_NUMBER_BITS} bits")

    @staticmethod
    def _length(value: object) -> int:
        """Characters of a text; items of a collection as characters."""
        if isinstance(value, (str, bytes)):
            return len(value)
        return _ITEM * len(value) if isinstance(value, Sized) and not isinstance(value, Undefined) else 0

    def _extent(self, value: object) -> int:
        return value if isinstance(value, int) else self._length(value)

    def _spend_size(self, values: Iterable[Any], indent: int = 0) -> int:
        """Pay for the text of values, and return how much it is. Walks into collections: one that holds
        another twice doubles its text. `indent` is paid for each item and level.
        """
        pending = [(value, 1) for value in values]
        total = 0
        while pending:
            value, depth = pending.pop()
            size = indent * depth
            if isinstance(value, (str, bytes)):
                size += len(value)
            elif isinstance(value, Mapping):
                pending += [(item, depth + 1) for pair in value.items() for item in pair]
            elif isinstance(value, (list, tuple, set, frozenset)):
                pending += [(item, depth + 1) for item in value]
            else:
                size += _SCALAR
            self.spend(1, size)
            total += size
        return total


def _filter(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


def _rewrite(node: nodes.Node, change: Callable[[nodes.Node], nodes.Node]) -> None:
    """Replace every node below `node` by what `change` makes of it, children first."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _rewrite(value, change)
            setattr(node, field, change(value))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _rewrite(item, change)
                    value[i] = change(item)


def _measured_node(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes), _CONCATENATE)
    if isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filter(node, _CONTAINER)
    return node
