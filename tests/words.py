"""Check the names, docstrings and phrases of `src/headwise`; `make lint` calls it.

`python tests/words.py` checks all packages, `python tests/words.py stats` one of them.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "headwise"

# First words of a docstring that open a clause instead of an instruction or a noun.
CLAUSES = set(
    """what whether how who whose where which why when that those these its it they as of is are has
    have does whatever whoever whichever something everything somebody""".split()
)
# The docstring of a function is imperative: `Return`, not `Returns`. Plural nouns are in no list.
THIRD_PERSON = set(
    """adds asks calls compares computes counts creates draws finds follows forgets gets gives goes
    hears hides holds keeps leaves lets looks makes measures moves needs notes observes prints puts
    reads refuses remembers replaces reports returns runs says sees sends sets shows stops takes
    tells tries turns writes yields""".split()
)
SPEECH = set(
    """foretell foretells tell tells told hear hears heard say says said ask asks asked
    unasked""".split()
)
# Parts of a name, wherever they stand in it.
PARTS = SPEECH | set("whose wish wishes wished road roads mend mended cure unjudged".split())
# Whole names, without leading underscores.
PRONOUNS = set("apart found kept made what who whom".split())
FUNCTIONS = set(
    """silence settle settled once_whole whole as_given keys_in_sight reader_of squeeze stretch
    by_note read_or_not careful became""".split()
)
CLASSES = set(
    """Net Road Replaced Waiting Settled Looking Asked Served Figures Kept Texts Figure Hugging Told
    Found Given""".split()
)
# The same layer in two packages, and in two libraries.
TWINS = {"Conv1D", "GPT2MultiHeadAttention"}
PHRASES = re.compile(
    r"\b(even attention|random repeats|at hand|in sight|as far as seen|middle half|none of these"
    r"|asked for|foretells?|tells?|told|hears?|heard|mends?|wishes"
    r"|(?:is|are|was|were|be|been) (?:asked|said))\b",
    re.IGNORECASE,
)


def words(name: str) -> list[str]:
    """Return the lower-case words of a name in snake case or camel case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).strip("_").lower().split("_")


def bad_name(name: str, worse: set[str]) -> bool:
    bare = name.strip("_")
    return bool(PARTS & set(words(name))) or bare in PRONOUNS or bare in worse


def names(tree: ast.AST) -> Iterator[tuple[int, str, set[str]]]:
    """Yield the line and name of each definition, argument, attribute and module-level variable,
    and of local variables that are verbs of speech or adjectives."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name, FUNCTIONS
            case ast.ClassDef():
                yield node.lineno, node.name, CLASSES
            case ast.arg():
                yield node.lineno, node.arg, set()
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr, set()
            case ast.Name(ctx=ast.Store()) if node.id in SPEECH | {"alive", "apart"}:
                yield node.lineno, node.id, set()
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    for target in ast.walk(statement):
                        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                            yield target.lineno, target.id, set()


def openings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and first word of each docstring that opens wrongly."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            first = re.match(r"[^\s,.:;]*", text).group()  # pyright: ignore[reportOptionalMemberAccess]
            function = not isinstance(node, ast.ClassDef | ast.Module)
            if first.lower() in CLAUSES | SPEECH or (function and first.lower() in THIRD_PERSON):
                yield node.body[0].lineno, first


def problems(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line of each problem in a file, and what to change."""
    source, texts = file.read_text(), list[tuple[int, str]]()
    if file.suffix == ".toml":
        texts = list(enumerate(source.splitlines(), 1))
    else:
        if bad_name(file.stem, set()):
            yield 1, f"rename the module {file.stem!r}"
        tree = ast.parse(source)
        for line, name, worse in names(tree):
            if bad_name(name, worse):
                yield line, f"rename {name!r}: nouns for values, verbs of the field for functions"
        for line, first in openings(tree):
            yield line, f"open the docstring with an imperative or a noun, not with {first!r}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT or "STRING" in tokenize.tok_name[token.type]:
                texts += enumerate(token.string.split("\n"), token.start[0])
    for line, text in texts:
        yield from ((line, f"rewrite {hit.group()!r}") for hit in PHRASES.finditer(text))


def homonyms(files: list[Path]) -> Iterator[str]:
    """Yield the class names that mean several things, with their modules."""
    places: dict[str, list[str]] = {}
    for file in (one for one in files if one.suffix == ".py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in TWINS:
                places.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    return (f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1)


def main(parts: list[str]) -> int:
    files: list[Path] = []
    for part in parts:
        place = PACKAGE / part
        files += [place] if place.is_file() else sorted(place.rglob("*.py"))
        files += sorted(place.rglob("*.toml"))
    found = [
        f"{file.relative_to(PACKAGE.parents[1])}:{line}: {problem}"
        for file in files
        for line, problem in sorted(set(problems(file)))
    ]
    found += (f"rename a class, as its name means several things: {one}" for one in homonyms(files))
    print("\n".join(found), end="\n" * bool(found))
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["."]))
