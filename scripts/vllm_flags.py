"""Writes ``core/data/vllm-flags.json``: every flag of ``vllm serve``, by release.

    python -m scripts.vllm_flags FOLDER... [--output FILE]      (in the repository's root)

Each FOLDER holds unpacked releases, ``VERSION/vllm/**/*.py``. The sources are read as syntax trees; vLLM is never
imported, so a release of any age and platform can be read. The functions that fill the parser
(``make_arg_parser``, ``add_cli_args`` and what they call) are walked statement by statement; the tables which they
derive from configuration dataclasses (``get_kwargs``) are derived here by the same rules from the field types.

Format (compact JSON)::

    {"source": str, "releases": [version...], "flags": {"--long-name": [VARIANT...]},
     "quantization_methods": {method: RANGES}, "syntax": {"dotted": RANGES, "optimization_level": RANGES, ...}}

RANGES is a list of ``[first, last]`` indices into ``releases``, both inclusive: the releases looked at that have it.
A release that was not looked at lies between its neighbours. VARIANT, newest last::

    {"in": RANGES, "kind": KIND, "names": [further names], "no": [names that set it false],
     "nargs": "+" | "?" | "append" | number, "choices": [...], "known": [...], "fold": true}

KIND: ``switch`` (no value), ``bool`` (no value, has a ``no`` form), ``truth`` (optional ``true``/``false``), ``int``,
``float``, ``str``, ``human`` (int or ``32k``), ``human-auto`` (also ``-1`` and ``auto``), ``json``, ``json-or-str``,
``pairs`` (``image=4,video=0``). With ``nargs`` the kind is that of one value. ``choices`` is absent where any value
of the kind is taken; choices that a release computes at run time are absent too. ``known`` are the values that such a
release has by itself where its parser takes any text and a later check refuses what nobody registered: a Literal
beside ``str``, the names of an enum, the keys of a registry. ``fold``: in upper or lower case.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.vllm_sources import Generic, Literal, Module, Opaque, Release, write_table

DATA = Path(__file__).resolve().parent.parent / "src" / "loadmaster" / "core" / "data"
OUTPUT = DATA / "vllm-flags.json"


@dataclass(frozen=True)
class Function:
    """A callable named in the sources."""

    name: str


class Kwargs(dict[str, Any]):
    """The keyword arguments of one ``add_argument``."""


# Callables that wrap another one without changing what it reads.
# Flags whose values a registry decides: module and table whose keys are the values, newest place first.
REGISTRIES = {
    "--load-format": [("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER")],
    "--tool-call-parser": [
        ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
        ("vllm.entrypoints.openai.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    ],
    "--tokenizer-mode": [("vllm.tokenizers.registry", "_VLLM_TOKENIZERS")],
    "--reasoning-parser": [("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER")],
}
FOLDED = {"--load-format"}
# Fields that take the path of a class, or whose values are a table of their own, beside the literals.
OPEN_FIELDS = {"distributed_executor_backend", "quantization"}
WRAPPERS = {"optional_type", "parse_type", "copy.deepcopy", "dict", "list", "tuple", "sorted"}
HUMAN_CALLABLES = {"human": "human_readable_int", "human-auto": "human_readable_int_or_auto"}
JSON_CALLABLES = ("json.loads", "from_cli", "from_json", "parse_dataclass", "nullable_json")


class Parser:
    """Walks the functions that build one release's parser and collects what they add."""

    def __init__(self, release: Release) -> None:
        self.release = release
        self.added: list[tuple[list[str], Kwargs]] = []
        self.human = self._human_arguments()
        self._depth = 0

    # ------------------------------------------------------------------------------ what get_kwargs derives

    def _human_arguments(self) -> dict[str, str]:
        """Field name -> kind, for the fields that get_kwargs reads as human-readable integers."""
        module = self.release.module("vllm.engine.arg_utils")
        assert module is not None
        found: dict[str, str] = {}
        sets: dict[str, list[str]] = {}
        for name in ("get_kwargs", "_compute_kwargs"):
            function = module.names.get(name)
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    try:
                        sets[node.targets[0].id] = sorted(ast.literal_eval(node.value))
                    except (ValueError, TypeError, SyntaxError):
                        continue
            for node in ast.walk(function):
                if isinstance(node, ast.If):
                    self._human_branch(node, sets, found)
        return found

    def _human_branch(self, node: ast.If, sets: dict[str, list[str]], found: dict[str, str]) -> None:
        texts = [ast.unparse(s.value) for s in node.body if isinstance(s, ast.Assign)]
        kind = {"human_readable_int": "human", "human_readable_int_or_auto": "human-auto"}
        kinds = [kind[text] for text in texts if text in kind]
        test = node.test
        if not kinds or not isinstance(test, ast.Compare) or ast.unparse(test.left) != "name":
            return
        right = test.comparators[0]
        if isinstance(right, ast.Name):
            names = sets.get(right.id, [])
        else:
            value = ast.literal_eval(right)
            names = [value] if isinstance(value, str) else sorted(value)
        for name in names:
            found.setdefault(name, kinds[0])

    def kwargs_of(self, module: Module, node: ast.ClassDef) -> dict[str, Kwargs]:
        return {name: self._field(name, *where) for name, where in self.release.fields(module, node).items()}

    def _field(self, name: str, module: Module, annotation: ast.expr) -> Kwargs:
        members = set(self.release.members(module, annotation))
        classes = [c for c in map(self.release.class_of, members) if c is not None]
        dicts = {m for m in members if (c := self.release.class_of(m)) is not None and self.release.is_dict_class(*c)}
        if dicts:
            members = (members - dicts) | {"dict"}
        if any(self.release.is_dataclass(*c) for c in classes):
            return Kwargs(type=Function("parse_dataclass"))
        if members == {"bool", "str", None} and self._takes_optional_text():
            return Kwargs(type=Function("str"), nargs="?")
        if "bool" in members:
            return Kwargs(action=Function("argparse.BooleanOptionalAction"))
        if any("IntEnum" in map(ast.unparse, node.bases) for _, node in classes):
            return Kwargs(type=Function("int"))  # read as text there, turned into the enum's number later
        literals = [m for m in members if isinstance(m, Literal)]
        if literals:
            options = [option for literal in literals for option in literal.options]
            kwargs = Kwargs(type=Function(type(options[0]).__name__))
            if "str" not in members:
                kwargs["choices"] = sorted(options)
            elif name not in OPEN_FIELDS:
                kwargs["known"] = sorted(options)
            return kwargs
        enums = [(module, node) for module, node in classes if "Enum" in map(ast.unparse, node.bases)]
        if len(enums) == 1 and members - {None} == {("class", enums[0][0].name, enums[0][1].name)}:
            names = set(self.release.enum_names(*enums[0]))
            if name == "backend" and ".lower() == 'auto'" in ast.unparse(module.tree):
                names.add("auto")  # a validator of the class reads it as None
            return Kwargs(type=Function("str"), known=sorted(names), fold=True)
        for collection in ("tuple", "list", "set"):
            for member in members:
                if member == collection or (isinstance(member, Generic) and member.name == collection):
                    return self._collection(collection, member)
        if "int" in members:
            return Kwargs(type=Function(HUMAN_CALLABLES.get(self.human.get(name, ""), "int")))
        if "float" in members:
            return Kwargs(type=Function("float"))
        others = any(
            isinstance(m, Opaque) or self.release.class_of(m) is not None or m == Generic("Callable", ())
            for m in members
        )
        if any(m == "dict" or (isinstance(m, Generic) and m.name in ("dict", "mapping")) for m in members):
            return Kwargs(type=Function("union_dict_and_str" if "str" in members or others else "json.loads"))
        return Kwargs(type=Function("str"))

    def _takes_optional_text(self) -> bool:
        module = self.release.module("vllm.engine.arg_utils")
        assert module is not None
        function = module.names.get("_compute_kwargs")
        return function is not None and "type_hints == {bool, str, type(None)}" in ast.unparse(function)

    def _collection(self, collection: str, member: Any) -> Kwargs:
        arguments = member.arguments if isinstance(member, Generic) else ()
        element: set[Any] = set(arguments[0]) if arguments else {"str"}
        literals = [m for m in element if isinstance(m, Literal)]
        kwargs = Kwargs(nargs="+")
        if collection == "tuple" and arguments and not any("..." in a for a in arguments):
            kwargs["nargs"] = len(arguments)
        if literals:
            kwargs["type"] = Function(type(literals[0].options[0]).__name__)
            kwargs["choices"] = sorted(literals[0].options)
        elif element == {"int"}:
            kwargs["type"] = Function("int")
        elif element == {"float"}:
            kwargs["type"] = Function("float")
        else:
            kwargs["type"] = Function("str")
        return kwargs

    # ------------------------------------------------------------------------------ walking the functions

    def run(self, module: Module, function: ast.FunctionDef, environment: dict[str, Any] | None = None) -> Any:
        self._depth += 1
        assert self._depth < 30, f"functions call each other: {function.name}"
        result = self._block(module, function.body, dict(environment or {}))
        self._depth -= 1
        return result

    def _block(self, module: Module, body: list[ast.stmt], env: dict[str, Any]) -> Any:
        for statement in body:
            if isinstance(statement, ast.Return):
                return self.value(module, statement.value, env) if statement.value else None
            result = self._statement(module, statement, env)
            if result is not None:
                return result
        return None

    def _statement(self, module: Module, statement: ast.stmt, env: dict[str, Any]) -> Any:
        if isinstance(statement, ast.ImportFrom):
            Module._import_from(module, statement)
        elif isinstance(statement, ast.Expr):
            self.value(module, statement.value, env)
        elif isinstance(statement, ast.Assign):
            self._assign(module, statement, env)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                if isinstance(target, ast.Subscript):
                    holder = self.value(module, target.value, env)
                    if isinstance(holder, dict):
                        holder.pop(self.value(module, target.slice, env), None)
        elif isinstance(statement, ast.For):
            self._for(module, statement, env)
        elif isinstance(statement, ast.If):
            self._block(module, statement.body, env)
            self._block(module, statement.orelse, env)
        elif isinstance(statement, ast.With | ast.Try):
            self._block(module, statement.body, env)
        return None

    def _assign(self, module: Module, statement: ast.Assign, env: dict[str, Any]) -> None:
        value = self.value(module, statement.value, env)
        for target in statement.targets:
            if isinstance(target, ast.Name):
                env[target.id] = value
            elif isinstance(target, ast.Subscript):
                holder = self.value(module, target.value, env)
                if isinstance(holder, dict):
                    holder[self.value(module, target.slice, env)] = value

    def _for(self, module: Module, statement: ast.For, env: dict[str, Any]) -> None:
        for item in self.value(module, statement.iter, env) if not isinstance(statement.iter, ast.Name) else []:
            if isinstance(statement.target, ast.Tuple) and isinstance(item, tuple | list):
                for name, part in zip(statement.target.elts, item):
                    if isinstance(name, ast.Name):
                        env[name.id] = part
            elif isinstance(statement.target, ast.Name):
                env[statement.target.id] = item
            self._block(module, statement.body, env)

    # ------------------------------------------------------------------------------ evaluating expressions

    def value(self, module: Module, node: ast.expr, env: dict[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._name(module, node.id, env)
        if isinstance(node, ast.Attribute):
            holder = self.value(module, node.value, env) if isinstance(node.value, ast.Name) else None
            if isinstance(holder, tuple) and holder[:1] == ("class",):
                return ("attribute", holder, node.attr)
            return Function(ast.unparse(node))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return self._items(module, node.elts, env)
        if isinstance(node, ast.Dict):
            return self._dict(module, node, env)
        if isinstance(node, ast.Subscript):
            holder = self.value(module, node.value, env)
            key = self.value(module, node.slice, env)
            return holder.get(key, Opaque(ast.unparse(node))) if isinstance(holder, dict) else Opaque(ast.unparse(node))
        if isinstance(node, ast.JoinedStr):
            return self._text(module, node, env)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.value(module, node.left, env), self.value(module, node.right, env)
            if type(left) is type(right) and isinstance(left, str | list):
                return left + right
            return Opaque(ast.unparse(node))
        if isinstance(node, ast.Call):
            return self._call(module, node, env)
        if isinstance(node, ast.ListComp):
            return self._comprehension(module, node, env)
        if isinstance(node, ast.Lambda):
            return Function("lambda " + ast.unparse(node.body))
        return Opaque(ast.unparse(node))

    def _name(self, module: Module, name: str, env: dict[str, Any]) -> Any:
        if name in env:
            return env[name]
        found = self.release.find(module, name)
        if found is None:
            return Function(name)
        where, statement = found
        if isinstance(statement, ast.ClassDef):
            return ("class", where.name, statement.name)
        if isinstance(statement, ast.FunctionDef):
            return Function(name)
        value = getattr(statement, "value", None)
        if isinstance(value, ast.expr):
            members = self.release.members(where, value) if isinstance(value, ast.Subscript) else frozenset()
            if any(isinstance(m, Literal) for m in members):
                return next(m for m in members if isinstance(m, Literal))
            return self.value(where, value, {})
        return Opaque(name)

    def _items(self, module: Module, nodes: list[ast.expr], env: dict[str, Any]) -> Any:
        items: list[Any] = []
        for node in nodes:
            value = self.value(module, node.value if isinstance(node, ast.Starred) else node, env)
            if not isinstance(node, ast.Starred):
                items.append(value)
            elif isinstance(value, list | tuple | dict):
                items.extend(value)
            else:
                return Opaque("*" + ast.unparse(node.value))
        return items

    def _dict(self, module: Module, node: ast.Dict, env: dict[str, Any]) -> Any:
        result = Kwargs()
        for key, value in zip(node.keys, node.values):
            if key is None:
                part = self.value(module, value, env)
                if isinstance(part, dict):
                    result.update(part)
            else:
                result[self.value(module, key, env)] = self.value(module, value, env)
        return result

    def _text(self, module: Module, node: ast.JoinedStr, env: dict[str, Any]) -> Any:
        parts = []
        for part in node.values:
            value = self.value(module, part.value if isinstance(part, ast.FormattedValue) else part, env)
            if not isinstance(value, str):
                return Opaque(ast.unparse(node))
            parts.append(value)
        return "".join(parts)

    def _comprehension(self, module: Module, node: ast.ListComp, env: dict[str, Any]) -> Any:
        source = self.value(module, node.generators[0].iter, env)
        found = self.release.class_of(source) if isinstance(source, tuple) else None
        if found is not None and ast.unparse(node.elt).endswith(".value"):
            return self.release.enum_values(*found)
        return Opaque(ast.unparse(node))

    def _call(self, module: Module, node: ast.Call, env: dict[str, Any]) -> Any:
        text = ast.unparse(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method == "add_argument":
            return self._add(module, node, env)
        if text.split(".")[-1] == "get_kwargs":
            found = self.release.class_of(self.value(module, node.args[0], env))
            assert found is not None, f"{self.release.version}: {ast.unparse(node)}"
            return self.kwargs_of(*found)
        if text == "get_args" and node.args:
            value = self.value(module, node.args[0], env)
            return list(value.options) if isinstance(value, Literal) else Opaque(ast.unparse(node))
        if text in WRAPPERS and node.args:
            value = self.value(module, node.args[0], env)
            return list(value) if text in ("list", "tuple", "sorted") and isinstance(value, list | dict) else value
        if text == "super" or text == "super()._customize_cli_kwargs":
            return self._super(module, node, env)
        if method:
            return self._method(module, node, env)
        return self._function(module, node, env)

    def _super(self, module: Module, node: ast.Call, env: dict[str, Any]) -> Any:
        owner = env.get("__class__")
        found = self.release.class_of(owner)
        if found is None or not isinstance(node.func, ast.Attribute):
            return Opaque(ast.unparse(node))
        for parent in self.release.bases(*found):
            inherited = self.release.method(*parent, node.func.attr)
            if inherited:
                return self._invoke(inherited, node, module, env, env.get("cls", owner))
        return Opaque(ast.unparse(node))

    def _method(self, module: Module, node: ast.Call, env: dict[str, Any]) -> Any:
        assert isinstance(node.func, ast.Attribute)
        holder = self.value(module, node.func.value, env)
        method = node.func.attr
        arguments = [self.value(module, a, env) for a in node.args]
        if isinstance(holder, dict) and method in ("items", "keys", "pop", "update", "get"):
            if method == "items":
                return list(holder.items())
            if method == "update":
                holder.update(arguments[0] if arguments and isinstance(arguments[0], dict) else {})
                return None
            return list(holder) if method == "keys" else getattr(holder, method)(*arguments)
        if isinstance(holder, str) and method == "replace":
            return holder.replace(*arguments)
        if isinstance(holder, list) and method in ("remove", "append"):
            if method == "append" or arguments[0] in holder:
                getattr(holder, method)(arguments[0])
            return None
        found = self.release.class_of(holder) if isinstance(holder, tuple) else None
        if found is not None and ("cli" in method or method.startswith("_customize")):
            target = self.release.method(*found, method)
            if target is not None:
                return self._invoke(target, node, module, env, holder)
        return Opaque(ast.unparse(node))

    def _invoke(
        self,
        target: tuple[Module, ast.ClassDef, ast.FunctionDef],
        node: ast.Call,
        module: Module,
        env: dict[str, Any],
        cls: Any,
    ) -> Any:
        where, owner, function = target
        names = [a.arg for a in function.args.args]
        local: dict[str, Any] = {"__class__": ("class", where.name, owner.name)}
        if names and names[0] in ("cls", "self"):
            local[names.pop(0)] = cls
        for name, argument in zip(names, node.args):
            local[name] = self.value(module, argument, env)
        return self.run(where, function, local)

    def _function(self, module: Module, node: ast.Call, env: dict[str, Any]) -> Any:
        name = ast.unparse(node.func)
        found = self.release.find(module, name)
        if found is not None and isinstance(found[1], ast.FunctionDef) and any(w in name for w in ("parser", "args")):
            function = found[1]
            local = {a.arg: self.value(module, n, env) for a, n in zip(function.args.args, node.args)}
            return self.run(found[0], function, local)
        return Opaque(ast.unparse(node))

    def _add(self, module: Module, node: ast.Call, env: dict[str, Any]) -> None:
        names = self._items(module, node.args, env)
        assert isinstance(names, list), ast.unparse(node)
        kwargs = Kwargs()
        for keyword in node.keywords:
            value = self.value(module, keyword.value, env)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            else:
                assert isinstance(value, dict), f"{self.release.version}: {ast.unparse(node)}"
                kwargs.update(value)
        if all(isinstance(name, str) for name in names):
            self.added.append((names, kwargs))
        else:
            raise AssertionError(f"{self.release.version}: a name that is no text in {ast.unparse(node)}")


# ---------------------------------------------------------------------------------------------- one release


def kind_of(kwargs: Kwargs) -> str:
    action = kwargs.get("action")
    name = action if isinstance(action, str) else action.name.split(".")[-1] if isinstance(action, Function) else ""
    if isinstance(action, tuple):
        name = action[-1]
    if name in ("store_true", "store_false"):
        return "switch"
    if name == "BooleanOptionalAction":
        return "bool"
    if name == "StoreBoolean":
        return "truth"
    declared = kwargs.get("type")
    text = declared.name if isinstance(declared, Function) else ""
    if isinstance(declared, tuple):
        text = declared[-1]
    if text == "bool" or (text == "str" and name == "StoreBoolean"):
        return "str" if text == "str" else "truth-text"
    if text in ("int", "float"):
        return text
    if text in ("human_readable_int", "human_readable_int_or_auto"):
        return "human" if text == "human_readable_int" else "human-auto"
    if text == "nullable_kvs":
        return "pairs"
    if text == "union_dict_and_str":
        return "json-or-str"
    if any(text.split(".")[-1] == c.split(".")[-1] for c in JSON_CALLABLES):
        return "json"
    return "str"


def variant(names: list[str], kwargs: Kwargs, paired: bool) -> tuple[str, dict[str, Any]] | None:
    """(long name, what the data file says about it), None for a positional or a help flag."""
    if not names[0].startswith("-") or kwargs.get("action") in ("version", "help"):
        return None
    long = next((name for name in names if name.startswith("--")), names[0])
    entry: dict[str, Any] = {"kind": kind_of(kwargs)}
    others = [name for name in names if name != long]
    if others:
        entry["names"] = others
    if entry["kind"] == "truth-text":
        entry["kind"] = "truth"
    elif entry["kind"] == "bool":
        longs = [name for name in names if name.startswith("--")]
        entry["no"] = ["--no-" + name[2:] for name in longs]
        if paired:
            for name in longs:
                for prefix, inverse in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
                    if name.startswith(prefix):
                        entry["no"].append(inverse + name.removeprefix(prefix))
    nargs = "append" if kwargs.get("action") == "append" else kwargs.get("nargs")
    if nargs is not None and entry["kind"] != "truth":
        entry["nargs"] = nargs
    choices = kwargs.get("choices")
    if isinstance(choices, list) and all(isinstance(c, str | int | float | None) for c in choices):
        entry["choices"] = [c for c in choices if c is not None]
    elif kwargs.get("known"):
        entry["known"] = kwargs["known"]
        if kwargs.get("fold"):
            entry["fold"] = True
    return long, entry


def flags_of(release: Release) -> dict[str, dict[str, Any]]:
    parser = Parser(release)
    paired = False
    for name in ("vllm.utils.argparse_utils", "vllm.utils"):
        module = release.module(name)
        if module is not None and "EnableDisableAction" in module.names:
            paired = True
    for name, function in entry_functions(release):
        module = release.module(name)
        assert module is not None
        parser.run(module, function)
    found: dict[str, dict[str, Any]] = {}
    for names, kwargs in parser.added:
        entry = variant(names, kwargs, paired)
        if entry is not None:
            found.setdefault(entry[0], entry[1])
    for name, places in REGISTRIES.items():
        keys = registered(release, places)
        if keys and name in found and "choices" not in found[name]:
            found[name]["known"] = sorted({*keys, *found[name].get("known", ())})
            if name in FOLDED:
                found[name]["fold"] = True
    return found


def registered(release: Release, places: list[tuple[str, str]]) -> list[str]:
    """The keys of the first of these tables that the release has."""
    for name, table_name in places:
        module = release.module(name)
        value = getattr(module.names.get(table_name), "value", None) if module else None
        if isinstance(value, ast.Dict):
            return sorted(str(key.value) for key in value.keys if isinstance(key, ast.Constant))
    return []


def entry_functions(release: Release) -> list[tuple[str, ast.FunctionDef]]:
    """The functions that build the server's parser: the OpenAI server's, and what ``vllm serve`` adds to it."""
    found: list[tuple[str, ast.FunctionDef]] = []
    for name in (
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.openai.cli_args",
        "vllm.entrypoints.openai.api_server",
    ):
        module = release.module(name)
        for function in ("make_arg_parser", "parse_args"):
            statement = module.names.get(function) if module else None
            if isinstance(statement, ast.FunctionDef) and not found:
                found.append((name, statement))
    assert found, f"{release.version}: no server parser found"
    serve = release.module("vllm.entrypoints.cli.serve")
    if serve is not None:
        for node in ast.walk(serve.tree):
            if isinstance(node, ast.FunctionDef) and node.name == "subparser_init":
                found.append((serve.name, only_arguments(node, "serve_parser")))
    scripts = release.module("vllm.scripts")
    main_function = scripts.names.get("main") if scripts else None
    if scripts is not None and isinstance(main_function, ast.FunctionDef):
        found.append((scripts.name, only_arguments(main_function, "serve_parser")))
    return found


def only_arguments(function: ast.FunctionDef, parser: str) -> ast.FunctionDef:
    """The function reduced to its ``parser.add_argument`` calls."""
    calls: list[ast.stmt] = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Expr) and ast.unparse(node.value).startswith(f"{parser}.add_argument(")
    ]
    return ast.FunctionDef(name=function.name, args=function.args, body=calls, decorator_list=[])


def quantization_methods(release: Release) -> list[str]:
    module = release.module("vllm.model_executor.layers.quantization")
    assert module is not None
    reader = Parser(release)
    for name in ("QuantizationMethods", "QUANTIZATION_METHODS", "_QUANTIZATION_CONFIG_REGISTRY"):
        if name in module.names:
            value = reader._name(module, name, {})
            methods = list(value.options) if isinstance(value, Literal) else value
            if isinstance(methods, list | dict) and methods:
                return [str(method) for method in methods]
    raise AssertionError(f"{release.version}: no quantization methods found")


def syntax_of(release: Release) -> list[str]:
    """What the release's argument parser understands beyond argparse."""
    text = ""
    for name in ("vllm.utils.argparse_utils", "vllm.utils"):
        module = release.module(name)
        node = module.names.get("FlexibleArgumentParser") if module else None
        if isinstance(node, ast.ClassDef):
            text = ast.unparse(node)
    features = {
        "underscores": "'-'" in text and "'_'" in text,
        "dotted": "create_nested_dict" in text,
        "append-list": "endswith('+')" in text,
        "optimization-level": "--optimization-level" in text,
        "dotted-human": "human_readable_int" in text,
        "optimization-dotted": "-O.level" in text,
        "optimization-mode": "-O.mode" in text,
        "optimization-short": "startswith('-O')" in text,
        "config-file": "_pull_args_from_config" in text,
    }
    engine = release.module("vllm.engine.arg_utils")
    reader = engine.names.get("optional_type") if engine else None
    features["pairs-for-json"] = reader is not None and "nullable_kvs" in ast.unparse(reader)
    return [name for name, present in features.items() if present]


# ---------------------------------------------------------------------------------------------- all releases


def ranges(indices: list[int]) -> list[list[int]]:
    """[1, 2, 3, 7] -> [[1, 3], [7, 7]]."""
    found: list[list[int]] = []
    for index in indices:
        if found and found[-1][1] == index - 1:
            found[-1][1] = index
        else:
            found.append([index, index])
    return found


def table(releases: list[Release]) -> dict[str, Any]:
    flags: dict[str, list[tuple[dict[str, Any], list[int]]]] = {}
    methods: dict[str, list[int]] = {}
    syntax: dict[str, list[int]] = {}
    for index, release in enumerate(releases):
        for name, entry in flags_of(release).items():
            variants = flags.setdefault(name, [])
            for known, indices in variants:
                if known == entry:
                    indices.append(index)
                    break
            else:
                variants.append((entry, [index]))
        for method in quantization_methods(release):
            methods.setdefault(method, []).append(index)
        for feature in syntax_of(release):
            syntax.setdefault(feature, []).append(index)
    return {
        "source": "read by scripts/vllm_flags.py from the Python sources of the listed vLLM releases (Apache-2.0)",
        "releases": [release.version for release in releases],
        "flags": {
            name: [
                {"in": ranges(indices), **entry} for entry, indices in sorted(variants, key=lambda item: item[1][-1])
            ]
            for name, variants in sorted(flags.items())
        },
        "quantization_methods": {name: ranges(indices) for name, indices in sorted(methods.items())},
        "syntax": {name: ranges(indices) for name, indices in sorted(syntax.items())},
    }


def main() -> int:
    return write_table(
        __doc__,
        OUTPUT,
        table,
        lambda found: f"{len(found['flags'])} flags",
    )


if __name__ == "__main__":
    sys.exit(main())
