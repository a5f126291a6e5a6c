"""The small changes that can be made to a source file: operators, constants, conditions, statements and returns."""

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

_OPERATORS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_NAMES = {"any": "all", "all": "any", "min": "max", "max": "min", "reversed": "list", "sorted": "list"}


class Change(NamedTuple):
    """One change: the kind, the line, and the bytes of the source that are replaced."""

    kind: str
    line: int
    begin: int
    end: int
    old: str
    new: str


def changes(source: str) -> list[Change]:
    """All changes of a file, in its order; none to annotations, messages of errors, docstrings and overloads."""
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]

    def change(kind: str, node: ast.expr | ast.stmt, new: str) -> Change:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Change(kind, node.lineno, begin, end, source.encode()[begin:end].decode(), new)

    found = [change(*variant) for node in _nodes(ast.parse(source)) for variant in _variants(node)]
    return sorted([one for one in found if one.old != one.new], key=lambda one: (one.begin, one.end, one.new))


def apply(source: str, made: list[Change]) -> str:
    """The source with changes, which do not overlap."""
    data = source.encode()
    for one in sorted(made, key=lambda one: one.begin, reverse=True):
        data = data[: one.begin] + one.new.encode() + data[one.end :]
    return data.decode()


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of code that runs and decides something."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_skipped(child):
                continue
            yield from _nodes(child)


def _is_skipped(node: ast.AST) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return any("overload" in ast.unparse(one) for one in node.decorator_list)
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _variants(node: Any) -> Iterator[tuple[str, Any, str]]:
    """(kind, the part that is replaced, its new source) of the changes of a node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _OPERATORS:
            yield "operator", node, _text(ast.Compare(node.left, [_OPERATORS[type(op)]()], node.comparators))
        case ast.BoolOp():
            yield "operator", node, _text(ast.BoolOp(_OPERATORS[type(node.op)](), node.values))
        case ast.BinOp() if type(node.op) in _OPERATORS and not isinstance(node.left, (ast.Constant, ast.JoinedStr)):
            yield "operator", node, _text(ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))
        case ast.UnaryOp(op=ast.Not()):
            yield "condition", node, _text(node.operand)
        case ast.Constant(value=bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(value=int() as value):
            yield "constant", node, str(value + 1)
        case ast.Name(id=name, ctx=ast.Load()) if name in _NAMES:
            yield "operator", node, _NAMES[name]
        case ast.If() | ast.IfExp():
            yield "condition", node.test, "True"
            yield "condition", node.test, "False"
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield "return", node, "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement", node, "pass"
        case _:
            pass


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
