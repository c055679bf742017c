"""Reads unpacked vLLM releases as syntax trees: names across modules, types, literals. Imports nothing of vLLM.

A release is a folder ``VERSION/vllm/**/*.py``. ``Release.find`` follows imports and re-exports to the
statement that defines a name; ``Release.value`` evaluates the few expression forms that command line tables
are made of. What is neither becomes an :class:`Opaque` with its source text, never a guess.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUILTIN_TYPES = {"bool", "int", "float", "str", "dict", "list", "tuple", "set", "bytes", "object"}
TYPING_NAMES = {
    "List": "list", "Tuple": "tuple", "Set": "set", "Dict": "dict", "Mapping": "mapping", "Sequence": "sequence",
    "Type": "type", "FrozenSet": "set",
}  # fmt: skip


def version_key(version: str) -> tuple[int, ...]:
    """``0.10.1.1.post2`` -> (0, 10, 1, 1): the release that the sources are of, builds put aside."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def releases_in(folder: Path) -> list[Release]:
    """The releases under ``folder`` that hold an engine, oldest first; of two builds of one release the last."""
    found: dict[tuple[int, ...], Release] = {}
    for path in sorted(folder.iterdir()):
        if (path / "vllm" / "engine" / "arg_utils.py").is_file() and version_key(path.name):
            key = version_key(path.name)
            found[key] = Release(".".join(map(str, key)), path)
    return [found[key] for key in sorted(found)]


@dataclass(frozen=True)
class Opaque:
    """Something that is not evaluated: its source text."""

    text: str


@dataclass(frozen=True)
class Literal:
    """``Literal[...]`` with its options."""

    options: tuple[Any, ...]


@dataclass(frozen=True)
class Generic:
    """``name[arguments]`` of a collection or dict type; ``arguments`` are sets of type members."""

    name: str
    arguments: tuple[frozenset[Any], ...]


@dataclass
class Module:
    name: str
    tree: ast.Module
    is_package: bool
    names: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._collect(self.tree.body)

    def _collect(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.names[statement.name] = statement
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        self.names.setdefault(target.id, statement)
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                self.names.setdefault(statement.target.id, statement)
            elif isinstance(statement, ast.ImportFrom):
                self._import_from(statement)
            elif isinstance(statement, ast.Import):
                for alias in statement.names:
                    self.imports.setdefault(alias.asname or alias.name, (alias.name, None))
            elif isinstance(statement, ast.If | ast.Try):
                self._collect(statement.body)
                if isinstance(statement, ast.Try):
                    self._collect([s for handler in statement.handlers for s in handler.body])
                self._collect(statement.orelse)
            elif isinstance(statement, ast.With):
                self._collect(statement.body)

    def _import_from(self, statement: ast.ImportFrom) -> None:
        base = statement.module or ""
        if statement.level:
            parts = self.name.split(".")
            keep = len(parts) - statement.level + (1 if self.is_package else 0)
            base = ".".join(parts[:keep] + ([base] if base else []))
        for alias in statement.names:
            if alias.name == "*":
                self.stars.append(base)
            else:
                self.imports.setdefault(alias.asname or alias.name, (base, alias.name))


class Release:
    """One unpacked release."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self.folder = folder
        self._modules: dict[str, Module | None] = {}
        self._members: dict[tuple[str, str], frozenset[Any]] = {}

    def module(self, name: str) -> Module | None:
        """The parsed module ``vllm.a.b``, or None if this release has no such file."""
        if name not in self._modules:
            path = self.folder.joinpath(*name.split("."))
            file, package = path.with_suffix(".py"), path / "__init__.py"
            source = package if package.is_file() else file
            self._modules[name] = (
                Module(name, ast.parse(source.read_text(encoding="utf-8")), source is package)
                if source.is_file()
                else None
            )
        return self._modules[name]

    def find(self, module: Module, name: str, depth: int = 0) -> tuple[Module, ast.stmt] | None:
        """The statement that defines ``name`` as seen from ``module``, through imports."""
        if depth > 20:
            return None
        if name in module.names:
            return module, module.names[name]
        targets = [module.imports[name]] if name in module.imports else [(star, name) for star in module.stars]
        for base, attribute in targets:
            if not base.startswith("vllm"):
                continue
            if attribute is None:
                continue
            source = self.module(base)
            if source is not None:
                found = self.find(source, attribute, depth + 1)
                if found:
                    return found
        return None

    def find_module(self, module: Module, name: str) -> Module | None:
        """The module that ``name`` stands for in ``module`` (``import vllm.x as name``)."""
        if name not in module.imports:
            return None
        base, attribute = module.imports[name]
        return self.module(base if attribute is None else f"{base}.{attribute}")

    # ------------------------------------------------------------------------------------------ types

    def members(self, module: Module, node: ast.expr | None) -> frozenset[Any]:
        """The members of a type: names of built-in types, Literal, Generic, ``None``, or ("class", module, name)."""
        if node is None:
            return frozenset()
        if isinstance(node, ast.Constant):
            if node.value is None:
                return frozenset({None})
            if isinstance(node.value, str):
                return self.members(module, ast.parse(node.value.strip(), mode="eval").body)
            return frozenset({Opaque(repr(node.value))})
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.members(module, node.left) | self.members(module, node.right)
        if isinstance(node, ast.Name):
            return self._named(module, node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(module, node)
        if isinstance(node, ast.Subscript):
            return self._subscript(module, node)
        return frozenset({Opaque(ast.unparse(node))})

    def _named(self, module: Module, name: str) -> frozenset[Any]:
        if name in BUILTIN_TYPES:
            return frozenset({name})
        if name in TYPING_NAMES:
            return frozenset({TYPING_NAMES[name]})
        if name == "Any":
            return frozenset({Opaque("Any")})
        key = (module.name, name)
        if key not in self._members:
            self._members[key] = frozenset({Opaque(name)})  # a type that names itself stays opaque
            self._members[key] = self._resolve(module, name)
        return self._members[key]

    def _resolve(self, module: Module, name: str) -> frozenset[Any]:
        found = self.find(module, name)
        if found is None:
            return frozenset({Opaque(name)})
        where, statement = found
        if isinstance(statement, ast.ClassDef):
            return frozenset({("class", where.name, statement.name)})
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(value, ast.expr):
            return self.members(where, value)
        return frozenset({Opaque(name)})

    def _attribute(self, module: Module, node: ast.Attribute) -> frozenset[Any]:
        if isinstance(node.value, ast.Name):
            if node.value.id in ("typing", "t"):
                return self._named(module, node.attr)
            target = self.find_module(module, node.value.id)
            if target is not None:
                return self._named(target, node.attr)
        return frozenset({Opaque(ast.unparse(node))})

    def _subscript(self, module: Module, node: ast.Subscript) -> frozenset[Any]:
        name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if name == "Callable":
            return frozenset({Generic("Callable", ())})
        arguments = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Optional":
            return self.members(module, arguments[0]) | {None}
        if name == "Union":
            return frozenset().union(*(self.members(module, argument) for argument in arguments))
        if name in ("Annotated", "SkipValidation", "InitVar", "Final", "Required"):
            return self.members(module, arguments[0])
        if name == "Literal":
            return frozenset({Literal(tuple(self._literal_options(module, arguments)))})
        inner = tuple(
            frozenset({"..."}) if isinstance(a, ast.Constant) and a.value is ... else self.members(module, a)
            for a in arguments
            if not isinstance(a, ast.List)
        )
        return frozenset({Generic(TYPING_NAMES.get(name, name), inner)})

    def _literal_options(self, module: Module, arguments: list[ast.expr]) -> list[Any]:
        options: list[Any] = []
        for argument in arguments:
            if isinstance(argument, ast.Constant):
                options.append(argument.value)
            elif isinstance(argument, ast.UnaryOp) and isinstance(argument.operand, ast.Constant):
                options.append(ast.literal_eval(argument))
            else:
                for member in self.members(module, argument):
                    if isinstance(member, Literal):
                        options.extend(member.options)
        return options

    # ------------------------------------------------------------------------------------------ classes

    def class_of(self, member: Any) -> tuple[Module, ast.ClassDef] | None:
        if isinstance(member, tuple) and member and member[0] == "class":
            module = self.module(member[1])
            if module is not None and isinstance(module.names.get(member[2]), ast.ClassDef):
                return module, module.names[member[2]]  # type: ignore[return-value]
        return None

    def bases(self, module: Module, node: ast.ClassDef) -> list[tuple[Module, ast.ClassDef]]:
        found = []
        for base in node.bases:
            for member in self.members(module, base.value if isinstance(base, ast.Subscript) else base):
                parent = self.class_of(member)
                if parent is not None:
                    found.append(parent)
        return found

    def is_dict_class(self, module: Module, node: ast.ClassDef) -> bool:
        if any(isinstance(base, ast.Name) and base.id == "dict" for base in node.bases):
            return True
        if any(isinstance(base, ast.Subscript) and ast.unparse(base.value) in ("dict", "Dict") for base in node.bases):
            return True
        return any(self.is_dict_class(*parent) for parent in self.bases(module, node))

    def is_dataclass(self, module: Module, node: ast.ClassDef) -> bool:
        for decorator in node.decorator_list:
            name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if name.split(".")[-1] in ("dataclass", "config"):
                return True
        return False

    def fields(self, module: Module, node: ast.ClassDef) -> dict[str, tuple[Module, ast.expr]]:
        """Annotated fields, of the bases too, in order: name -> (module, type expression)."""
        found: dict[str, tuple[Module, ast.expr]] = {}
        for parent in reversed(self.bases(module, node)):
            found.update(self.fields(*parent))
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = ast.unparse(statement.annotation)
                if not re.match(r"(typing\.)?(ClassVar|InitVar)\b", text):
                    found[statement.target.id] = (module, statement.annotation)
        return found

    def method(
        self, module: Module, node: ast.ClassDef, name: str
    ) -> tuple[Module, ast.ClassDef, ast.FunctionDef] | None:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return module, node, statement
        for parent in self.bases(module, node):
            found = self.method(*parent, name)
            if found:
                return found
        return None

    def enum_values(self, module: Module, node: ast.ClassDef) -> list[Any]:
        return [s.value.value for s in node.body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant)]

    def enum_names(self, module: Module, node: ast.ClassDef) -> list[str]:
        """The names of an enum's members."""
        targets = [s.targets[0] for s in node.body if isinstance(s, ast.Assign)]
        return [target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("_")]


def write_table(
    description: str | None,
    output: Path,
    table: Callable[[list[Release]], dict[str, Any]],
    summary: Callable[[dict[str, Any]], str],
) -> int:
    """The command line of a generator: read the folders given, write ``table`` of all releases, print ``summary``."""
    options = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    options.add_argument("folders", nargs="+", type=Path, help="folders of unpacked releases")
    options.add_argument("--output", type=Path, default=output)
    arguments = options.parse_args()
    releases = sorted(
        (release for folder in arguments.folders for release in releases_in(folder)),
        key=lambda release: version_key(release.version),
    )
    if not releases:
        print("no release found", file=sys.stderr)
        return 1
    found = table(releases)
    arguments.output.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{len(releases)} releases, {summary(found)}, {arguments.output.stat().st_size} bytes")
    return 0
