"""Pages of documentation name what is there: links, files, symbols, benchmarks, commands; and say nothing twice."""

import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.__main__ import benchmark_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), ROOT / "DECISIONS.md"]
FOLDERS = ("app", "docs", "graph", "migrations", "profiler", "runtime", "scripts", "search", "tests")
OF_USERS = {"script.py", "mine.json", "strategy.json", "plan.py", "gpu-check.json", "setup.py"}
"""Files that pages name without their being in the tree: users' own, and some that were considered."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def tree() -> tuple[str, ...]:
    """Return files and folders of the tree, relative to its root."""
    inside = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts
    ]
    beside = [path for path in ROOT.iterdir() if path.is_file()]
    return tuple(path.relative_to(ROOT).as_posix() for path in (*inside, *beside))


@cache
def in_tree(name: str) -> list[str]:
    """Return the paths that a name may mean, which may lack folders in front, and have stars."""
    return [path for path in tree() if fnmatch(path, name) or fnmatch(path, f"*/{name}")]


def prose(text: str) -> str:
    """Return a page without blocks of code."""
    return re.sub(r"(?m)^    .*$", "", re.sub(r"(?ms)^```.*?^```$", "", text))


def blocks(text: str) -> str:
    """Return the lines of a page's blocks of code; one that a backslash parts is one."""
    fenced = re.findall(r"(?ms)^```\w*\n(.*?)^```$", text)
    indented = re.findall(r"(?m)^    (.*)$", re.sub(r"\\\n\s*", "", text))
    return "\n".join((*fenced, *indented))


def marked(text: str) -> Iterator[str]:
    """Yield what stands between marks of code in prose."""
    for code in re.findall(r"`([^`]+)`", prose(text)):
        yield " ".join(code.split())


def paths_named(text: str) -> set[str]:
    """Return the paths of source files and folders among the words of marked code."""
    words = {word.strip("().,;:'\"").rstrip("/") for code in marked(text) for word in code.split()}
    first = tuple(f"{folder}/" for folder in FOLDERS)
    sources = {word for word in words if re.search(r"\.(py|json|yaml)$", word) or word.startswith(first)}
    return {word for word in sources if not re.match(r"[A-Z_]+/", word)}  # a variable's folder


def tables(text: str) -> Iterator[list[str]]:
    """Yield the rows of each table, without its head."""
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text + "\n"):
        yield block.splitlines()[2:]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def twice(lines: list[str]) -> list[str]:
    return [line for line, count in Counter(lines).items() if count > 1 and line]


def rows_said_twice(text: str) -> list[str]:
    """Return rows that a table has twice; of tables of two columns, a thing and what is said of it, the thing."""
    found = []
    for rows in tables(text):
        found += twice(rows)
        if all(len(cells(row)) == 2 for row in rows):
            found += twice([cells(row)[0] for row in rows])
    return found


@pages
def test_no_row_and_no_paragraph_stands_twice(page: Path) -> None:
    text = page.read_text()
    paragraphs = [part for part in prose(text).split("\n\n") if len(part) > 80 and not part.startswith("|")]
    assert rows_said_twice(text) + twice(paragraphs) == []


def test_a_row_is_told_by_its_first_cell_where_there_are_two() -> None:
    head = "| what | where |\n|---|---|\n"
    assert rows_said_twice(f"{head}| a | b |\n| a | c |\n") == ["a"]
    assert rows_said_twice("| n | s | ms |\n|---|---|---|\n| a | b | 1 |\n| a | c | 1 |\n") == []


@pages
def test_files_that_a_page_names_are_there(page: Path) -> None:
    names = paths_named(page.read_text()) - OF_USERS
    assert [name for name in sorted(names) if not in_tree(name)] == []


@pages
def test_links_lead_to_a_page_and_a_heading(page: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page.read_text()))):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in anchors(target.read_text())):
            missing.append(link)
    assert missing == []


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    heads = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\(([a-z-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert named == {path.name for path in DOCS.glob("*.md")} - {"README.md"}


def test_symbols_of_the_architecture_are_in_the_files_of_their_row() -> None:
    rows = [row for table in tables((DOCS / "architecture.md").read_text()) for row in table]
    missing = []
    for row in rows:
        files = [ROOT / path for name in paths_named(row) for path in in_tree(name)]
        sources = [source for file in files for source in (file.rglob("*.py") if file.is_dir() else [file])]
        text = "\n".join(source.read_text() for source in sources)
        symbols = [
            code for code in marked(row) if re.fullmatch(r"[A-Za-z_.][\w.]*", code) and not in_tree(code)
        ]
        missing += [name for name in symbols if not re.search(rf"\b{name.split('.')[-1]}\b", text)]
    assert len(rows) > 20
    assert missing == []


@pages
def test_benchmarks_that_a_page_names_are_there(page: Path) -> None:
    named = set(re.findall(r"scripts/bench ([a-z_]+)", page.read_text()))
    assert named <= set(benchmark_names())


def commands_shown(text: str) -> Iterator[list[str]]:
    """Yield the words behind `app` of each of its command lines that a page shows, up to a quote or a comment."""
    in_blocks = re.findall(r"(?m)(?:^|(?<!from)\s)(app [a-z].*)$", blocks(text))
    for line in (*in_blocks, *(code for code in marked(text) if re.match(r"app [a-z]", code))):
        yield re.split(r"['\"#]|[ ]{2,}|\||;|&&", line)[0].split()[1:]


def is_command(command: Any, words: list[str]) -> bool:
    """Tell whether words are a command of this one, or the beginning of one, with options that it has."""
    while words and hasattr(command, "commands"):
        name, *words = words
        if name.rstrip(",") not in command.commands:
            return False
        command = command.commands[name.rstrip(",")]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return set(re.findall(r"(?<!\S)--[a-z-]+", " ".join(words))) <= options | {"--help"}


@pages
def test_commands_that_a_page_shows_have_these_options(page: Path) -> None:
    from typer.main import get_command

    from app.cli.application import application

    shown = list(commands_shown(page.read_text()))
    assert [" ".join(words) for words in shown if not is_command(get_command(application), words)] == []
