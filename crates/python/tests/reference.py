"""The reference pages `python.md` and `vllm-settings.md` in `docs/reference`, made from stubs and sources.

Nothing is imported: names come from each `__all__`, signatures and docstrings from the syntax trees.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

PACKAGE = Path(__file__).parents[1] / "python" / "poorwill"
SETTINGS = PACKAGE / "vllm" / "_environment.py"

# Variables of other programs that the package or its library reads, with the accepted values and the meaning.
SWITCHES = {
    "POORWILL_DISABLE_PIN": (
        "`0`, `1`",
        "`1`: no host memory of offloaded weights is page-locked; overrides `pin`",
    ),
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": ("`0`, `1`", "the same, by vLLM's name"),
    "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": (
        "`0`, `1`",
        "`1`: no device reads host memory in place; it gets copies",
    ),
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": (
        "`0`, `1`",
        "vLLM's: `0` keeps its estimate of CUDA graphs out of the KV cache's size; "
        "under `POORWILL_BUDGET` graphs are subtracted all the same",
    ),
    "VLLM_TRITON_FORCE_FIRST_CONFIG": (
        "`0`, `1`",
        "vLLM's: `1` is refused with `POORWILL_TRITON=1`, since no kernel is tuned then",
    ),
    "PYTORCH_ALLOC_CONF": (
        "text",
        "PyTorch's: options that `allocator_settings` does not change stay in force",
    ),
    "PYTORCH_CUDA_ALLOC_CONF": ("text", "the same, by its older name"),
    "PYTORCH_HIP_ALLOC_CONF": ("text", "the same for HIP"),
}

ABOUT_SETTINGS = """
All settings are environment variables, given where the server starts:
`POORWILL_SLEEP_MODE=1 vllm serve MODEL --enable-sleep-mode`. No option or configuration file of vLLM
sets them. Every process of the engine must see them. With Ray, also set
`VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=POORWILL_`. An invalid value ends the start of an engine that
uses the setting, with the accepted values. An empty variable counts as unset. [vllm.md](../vllm.md)
says how the settings work together, and [budgets.md](../budgets.md) which variables of other programs
limit a GPU.
"""
ABOUT_CHOICE = """
vLLM 0.25 and later choose Poorwill by `--enable-sleep-mode --sleep-mode-backend poorwill`, earlier
versions by `--enable-sleep-mode` and `POORWILL_SLEEP_MODE=1`.
"""
ABOUT_SWITCHES = "These also count outside of vLLM, in every call that they concern."
ABOUT_API = """
Generated from the type stubs and docstrings, which `help(poorwill.arena)` shows, too. Sizes are in
bytes and times in seconds, as the names say. All errors but those of wrong arguments derive from
`poorwill.PoorwillError`. `Device` is an int, a text like "cuda:0" or "host:8GiB", or a torch.device;
`Cap` is an int, a float, or a text.
"""

# Of each function that reads a setting: its type, the accepted values, and the unit.
KINDS = {
    "_switch": ("switch", "`0`, `1`", ""),
    "_after_level2": ("choice", "`refuse`, `serve`", ""),
    "_bytes": ("size", "like `64GiB`, or a number", "bytes"),
    "triton_shared_memory_bytes": ("size", "above 0, like `99KiB`, or a number", "bytes"),
    "_budget": ("size or share", "like `22528MiB`, `0.92` or `92%`", "bytes, or a share of the total"),
    "_seconds": ("number", "0 to 3600", "seconds"),
}

Definition: TypeAlias = ast.FunctionDef | ast.ClassDef


def python_page() -> str:
    """The reference of the public Python API."""
    parts = ["# Python API", _text(ABOUT_API)]
    for module in ("poorwill", "poorwill.torch", "poorwill.offload", "poorwill.triton"):
        parts += _module(module)
    return "\n\n".join(parts) + "\n"


def settings_page() -> str:
    """The reference of the settings, from `_environment.read` and the fields that it fills."""
    rows = ["| variable | type | values | unit | default | meaning |", "|---|---|---|---|---|---|"]
    for setting in settings():
        kind, values, unit = KINDS[setting.reader]
        default = setting.default.replace(".0`", "`")
        rows.append(
            f"| `{setting.variable}` | {kind} | {values} | {unit} | {default} | {_as_cell(setting.meaning)} |"
        )
    switches = ["| variable | values | meaning |", "|---|---|---|"]
    switches += [f"| `{name}` | {values} | {meaning} |" for name, (values, meaning) in SWITCHES.items()]
    parts = ["# vLLM: settings", _text(ABOUT_SETTINGS), _text(ABOUT_CHOICE), "\n".join(rows)]
    parts += ["## Variables of the library, vLLM and PyTorch", ABOUT_SWITCHES, "\n".join(switches)]
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class Setting:
    """A setting of the plugin, as `_environment` has it."""

    variable: str
    reader: str
    default: str
    meaning: str


def settings() -> list[Setting]:
    """The settings in the order of the fields."""
    tree = ast.parse(SETTINGS.read_text())
    variables = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    fields = {name: (default, meaning) for name, _, default, meaning in _fields(_find(tree, "Environment"))}
    returned = next(node for node in ast.walk(_find(tree, "read")) if isinstance(node, ast.Return))
    assert isinstance(returned.value, ast.Call)
    found = []
    for keyword in returned.value.keywords:
        call = keyword.value
        assert keyword.arg is not None
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        default, meaning = fields[keyword.arg]
        constants = [
            argument.id
            for argument in call.args
            if isinstance(argument, ast.Name) and argument.id in variables
        ]
        # A function for one setting alone names the variable itself.
        constant = (
            constants[0]
            if constants
            else next(
                node.id
                for node in ast.walk(_find(tree, call.func.id))
                if isinstance(node, ast.Name) and node.id in variables
            )
        )
        shown = {"False": "`0`", "True": "`1`", "None": "none"}.get(default, f"`{default.strip(chr(39))}`")
        found.append(Setting(str(variables[constant]), call.func.id, shown.replace('"', ""), meaning))
    return found


def variables_read() -> set[str]:
    """The environment variables that the package's code names."""
    pattern = re.compile(r"\b(?:POORWILL|VLLM|PYTORCH)_[A-Z0-9_]*[A-Z0-9]\b")
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(pattern.findall(node.value))
    return found


def _text(lines: str) -> str:
    return " ".join(lines.split())


def _module(name: str) -> Iterator[str]:
    init = _source(name)
    tree = ast.parse(init.read_text())
    yield f"## {name}"
    yield _summary(ast.get_docstring(tree) or "")
    places = {
        alias.asname or alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    classes, functions, others = [], [], []
    for public in _public(tree):
        if public.startswith("__") or public == "triton":
            continue
        home = places.get(public)
        source = tree if home is None else ast.parse(_source(str(home)).read_text())
        found = _maybe(source, public)
        if isinstance(found, ast.FunctionDef):
            functions.append(_function(found, public))
        elif isinstance(found, ast.ClassDef):
            classes.append(_class(found))
        else:
            others.append(f"- `{public}`: `{_alias(source, public)}`")
    yield from functions
    yield from classes
    if others:
        yield "Types:\n\n" + "\n".join(others)


def _source(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    for candidate in (path / "__init__.py", path.with_suffix(".pyi"), path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(module)


def _public(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise LookupError("__all__")


def _maybe(tree: ast.Module, name: str) -> Definition | None:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    return None


def _find(tree: ast.Module, name: str) -> Definition:
    found = _maybe(tree, name)
    assert found is not None, name
    return found


def _alias(tree: ast.Module, name: str) -> str:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
            return ast.unparse(node.value)
    raise LookupError(name)


def _function(node: ast.FunctionDef, name: str) -> str:
    return f"### {name}\n\n```text\n{_signature(node, name)}\n```\n\n{ast.get_docstring(node) or ''}"


def _class(node: ast.ClassDef) -> str:
    """A class: its docstring, its constructor's signature, a table of attributes, and its methods."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    making = next((each for each in methods if each.name in ("__new__", "__init__")), None)
    bases = [ast.unparse(base) for base in node.bases]
    is_value = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    is_made = making is not None and "Internal." not in (ast.get_docstring(making) or "")
    title = _signature(making, node.name) if making is not None and is_made else node.name
    kind = f"({', '.join(bases)})" if bases and not is_made and not is_value else ""
    shown = title.split(" -> ")[0] + kind
    code = [f"```text\n{shown}\n```"] if "(" in shown else []
    parts = [f"### {node.name}", *code, ast.get_docstring(node) or ""]
    rows = []
    for name, type_, _, meaning in _fields(node):
        rows.append((name, type_, meaning))
    for each in methods:
        if any(ast.unparse(decorator) == "property" for decorator in each.decorator_list):
            if not each.name.startswith("_"):
                rows.append((each.name, _type(each.returns), ast.get_docstring(each) or ""))
    if rows:
        table = ["| attribute | type | meaning |", "|---|---|---|"]
        table += [
            f"| `{name}` | `{_as_cell(type_)}` | {_as_cell(_summary(about))} |" for name, type_, about in rows
        ]
        parts.append("\n".join(table))
    listed = []
    for each in methods:
        is_property = any(ast.unparse(decorator) == "property" for decorator in each.decorator_list)
        if each.name.startswith("_") or is_property:
            continue
        listed.append(f"- `{_signature(each, each.name)}`: {_documentation(each)}")
    if listed:
        parts.append("\n".join(listed))
    return "\n\n".join(parts)


def _fields(node: Definition) -> Iterator[tuple[str, str, str, str]]:
    """Annotated attributes: name, type, default, and the string after them."""
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith("_"):
            continue
        about = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            about = " ".join(str(after.value.value).split())
        default = "" if field.value is None else ast.unparse(field.value)
        yield ast.unparse(field.target), _type(field.annotation), default, about


def _signature(node: ast.FunctionDef, name: str) -> str:
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, /)?(, |$)", "", arguments)
    arguments = re.sub(r"(?<=[\w\]\"])=(?=\S)", " = ", arguments)
    returns = "" if node.returns is None else f" -> {_type(node.returns)}"
    return f"{name}({_plain(arguments)}){returns}"


def _type(annotation: ast.expr | None) -> str:
    return "" if annotation is None else _plain(ast.unparse(annotation))


def _plain(text: str) -> str:
    """Private aliases of types by their meaning."""
    for alias, meaning in [
        ("_Device", "Device"),
        ("_Cap", "Cap"),
        ("_Tags", "str | Iterable[str]"),
        ("_Dtype", "dtype"),
        ("_State", "str"),
    ]:
        text = re.sub(rf"(?<!\w){alias}(?!\w)", meaning, text)
    return text.replace("'", '"')


def _documentation(node: Definition) -> str:
    """A docstring as one paragraph, for a list."""
    return " ".join((ast.get_docstring(node) or "").split())


def _summary(text: str) -> str:
    return " ".join(text.split("\n\n", 1)[0].split())


def _as_cell(text: str) -> str:
    return text.replace("|", "\\|").removesuffix(".")
