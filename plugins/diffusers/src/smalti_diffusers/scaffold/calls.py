"""How the class of a pipeline calls its model, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from smalti_diffusers.families.transformer import Time

_TIMES: Mapping[tuple[str, ...], Time] = {
    (): "1000t",
    ("/1000",): "t",
    ("/1000", "1-"): "1-t",
    ("/1000", "1000-"): "(1000-1000t)/1000",
}
"""By the arithmetic between the scheduler's timestep and the model's, sorted."""


@dataclass(frozen=True)
class PipelineCode:
    """The source of a pipeline's class. `part` is the name of the model in it, `model` the model's class."""

    pipeline: type
    part: str
    model: type
    call: ast.FunctionDef = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "call", _function(self.pipeline, "__call__"))

    @cached_property
    def _calls(self) -> list[ast.Call]:
        found = (node for node in ast.walk(self.call) if isinstance(node, ast.Call))
        return sorted((node for node in found if ast.unparse(node.func) == f"self.{self.part}"), key=lambda node: node.lineno)

    @cached_property
    def arguments(self) -> Mapping[str, ast.expr]:
        """What the model is called with first, by its own names; empty if no call is found."""
        if not self._calls:
            return {}
        names = [name for name in inspect.signature(self.model.forward).parameters if name != "self"]  # type: ignore[attr-defined]
        call = self._calls[0]
        given = dict(zip(names, call.args, strict=False))
        return given | {each.arg: each.value for each in call.keywords if each.arg is not None}

    @cached_property
    def encoded(self) -> tuple[str, ...]:
        """The variables that take what `encode_prompt` returns, in order; empty if it is not one tuple."""
        for node in ast.walk(self.call):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                target = node.targets[0]
                if ast.unparse(node.value.func) == "self.encode_prompt" and isinstance(target, ast.Tuple):
                    return tuple(ast.unparse(each) for each in target.elts)
        return ()

    def operations(self, argument: str) -> tuple[str, ...]:
        """The arithmetic by which an argument of the model follows from what the pipeline has, sorted."""
        found = self.arguments.get(argument)
        return () if found is None else tuple(sorted(self._arithmetic(found, found.lineno, frozenset())))

    def time(self, argument: str) -> Time | None:
        """What the model is given for the time; None if there is no such argument, or its arithmetic is not known."""
        return _TIMES.get(self.operations(argument)) if argument in self.arguments else None

    @property
    def sign(self) -> int:
        """-1 if the pipeline negates the model's output."""
        after = self._calls[0].lineno if self._calls else 0
        negated = (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.UnaryOp)
            and isinstance(node.value.op, ast.USub)
            and ast.unparse(node.targets[0]) == ast.unparse(node.value.operand)
            and node.lineno > after
            for node in ast.walk(self.call)
        )
        return -1 if any(negated) else 1

    @staticmethod
    def text(expression: ast.expr) -> str:
        return ast.unparse(expression)

    @staticmethod
    def names(expression: ast.expr) -> list[str]:
        """The variables in it, in order."""
        return [node.id for node in ast.walk(expression) if isinstance(node, ast.Name)]

    def defaults(self, function: str) -> Mapping[str, object]:
        """The parameters of a method with their defaults; empty if there is no such method."""
        method = getattr(self.pipeline, function, None)
        if method is None:
            return {}
        found = inspect.signature(method).parameters.values()
        return {each.name: each.default for each in found if each.name != "self" and each.kind is not each.VAR_KEYWORD}

    def source(self, method: str) -> str:
        """Of one method; "" if there is none."""
        found = getattr(self.pipeline, method, None)
        return inspect.getsource(found) if found is not None else ""

    def _arithmetic(self, expression: ast.expr, line: int, seen: frozenset[str]) -> Iterator[str]:
        """The operations of an expression, and of the assignments before `line` to the variables in it."""
        for node in _walk(expression):
            if isinstance(node, ast.BinOp):
                yield _operation(node)
            elif isinstance(node, ast.Name) and node.id not in seen:
                seen = seen | {node.id}
                for each in ast.walk(self.call):
                    if isinstance(each, ast.Assign) and each.lineno < line and ast.unparse(each.targets[0]) == node.id:
                        yield from self._arithmetic(each.value, line, seen)


def _walk(expression: ast.expr) -> Iterator[ast.AST]:
    """The nodes of an expression without the arguments of `.expand`, `.to` and `.repeat`, which change no values."""
    yield expression
    for child in ast.iter_child_nodes(expression):
        if isinstance(child, ast.expr) and not _is_shape(expression, child):
            yield from _walk(child)


def _is_shape(parent: ast.expr, child: ast.expr) -> bool:
    called = parent.func if isinstance(parent, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in ("expand", "to", "repeat") and child is not called


def _operation(node: ast.BinOp) -> str:
    left, right = ast.unparse(node.left), ast.unparse(node.right)
    if isinstance(node.op, ast.Div) and (right in ("1000", "1000.0") or right.endswith("num_train_timesteps")):
        return "/1000"
    if isinstance(node.op, ast.Sub) and left.partition(".")[0] in ("1", "1000"):
        return f"{left.partition('.')[0]}-"
    return ast.unparse(node)


def _function(owner: type, name: str) -> ast.FunctionDef:
    found = ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, name)))).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found
