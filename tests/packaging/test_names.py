"""One meaning for each name: no class is defined twice, and no alias has the name of a class."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("app", "graph", "profiler", "runtime", "search", "migrations", "scripts")


def names_of_types(source: str) -> Iterator[str]:
    """Yield the names of classes anywhere in a module, and of the aliases of types at its top."""
    tree = ast.parse(source)
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign) and is_alias(node.value):
            yield from (f"alias {name.id}" for name in node.targets if isinstance(name, ast.Name))


def is_alias(value: ast.expr) -> bool:
    """Tell whether it is a generic type or a union; an option of the command line is annotated, and no alias."""
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.BitOr)
    return isinstance(value, ast.Subscript) and ast.unparse(value.value) != "Annotated"


@cache
def places_of_types() -> dict[str, list[str]]:
    """Return the files that define each name, outside of tests."""
    places: dict[str, list[str]] = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in names_of_types(path.read_text()):
                places[name].append(str(path.relative_to(ROOT)))
    return places


def test_no_class_is_defined_twice() -> None:
    places = places_of_types()
    assert len(places) > 500
    assert {name: files for name, files in places.items() if len(files) > 1 and "alias" not in name} == {}


def test_no_alias_has_the_name_of_a_class() -> None:
    places = places_of_types()
    aliases = {name.removeprefix("alias ") for name in places if name.startswith("alias ")}
    assert {name: places[name] + places[f"alias {name}"] for name in aliases if name in places} == {}


def test_names_are_found_where_modules_have_them() -> None:
    source = "A = int | str\nB = dict[str, int]\nC = Annotated[int, 1]\nD = 3\nclass E:\n    class F: ...\n"
    assert sorted(names_of_types(source)) == ["E", "F", "alias A", "alias B"]
