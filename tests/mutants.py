"""Mutation testing: break the session's code in a small way, and see whether its tests notice.

    python -m tests.mutants --sample 300 --seed 2026         # what docs/testing.md reports; half an hour, two processes
    python -m tests.mutants --list                           # every mutant there is, and nothing is run
    python -m tests.mutants --only 'cancel.py:68'            # those of one place, such as a survivor
    python -m tests.mutants --only 'cancel.py:68' --tests tests/session/test_cancel.py

Needs the `test` extra and `coverage`. How it works:

1. The project is copied, once for each of `--jobs` runners; each has a throw-away PostgreSQL server of its own.
2. One run of the tests (`--tests`) under coverage, in one world for each test, maps each line to the tests that run
   it. A line that runs at import only (a statement, the table of transitions, a constant) is mapped by its name: to
   the tests that run a line which uses it, also by way of other names.
3. Mutants are made from the syntax tree by the operators below, shuffled by `--seed`, and the first `--sample` are
   taken. What stays as it is: docstrings, annotations and type aliases, overloads, protocols, decorators, what is
   given to an exception, log calls, and lines marked `no cover`.
4. Each runs against `CAP` of its tests, up to the first failure: those that have killed others, then those that run
   most lines, of the `FILES` files nearest to it. What survives that meets `REST` more in a second round. Over the time
   limit counts as killed, and is counted apart.
5. `--control` unchanged copies run in the same way among them: one that is "killed" means that tests are flaky.

Runners are forked from a process that has imported the libraries and nothing of ours, which saves a second for each.
"""

from __future__ import annotations

import argparse
import ast
import copy
import fnmatch
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCOPE = ("awa_sqla/session/*.py",)
TESTS = ("tests/session", "tests/maintenance")
COPIED = ("awa_sqla", "tests", "docs", "alembic", "examples", "pyproject.toml", "alembic.ini", "README.md")
LIBRARIES = ("pytest", "sqlalchemy.ext.asyncio", "sqlalchemy.dialects.postgresql", "psycopg", "psycopg2")
LIBRARIES += ("asyncpg", "pydantic", "blake3", "coverage")
WORLDS = ("psycopg", "async-psycopg", "async-asyncpg", "psycopg2")
CAP = 40
FILES = 3
REST = 120
SLOW = 0.3
LIMIT = 30.0


# ---------------------------------------------------------------------------------------------------- mutants
@dataclass(frozen=True)
class Mutant:
    """One change of one node: `index` is the node's place in `ast.walk`, `change` what is done to it."""

    path: str
    line: int
    index: int
    operator: str
    variant: int
    before: str
    after: str
    span: tuple[int, int]

    @property
    def place(self) -> str:
        """Where it is."""
        return f"{Path(self.path).name}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place} {self.operator}: {self.before}  ->  {self.after}"


COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
#: Calls whose arguments are a list of parts of a statement, any of which may be forgotten.
LISTS = {"and_", "or_", "where", "order_by", "returning", "coalesce", "union", "concat"}
#: Calls whose text is SQL, a bind, an attribute or an event.
TEXTS = {"literal_column", "text", "op", "bindparam", "getattr", "cte", "prefix_with", "column", "listen", "get"}
#: Calls that matter to type checkers or to nobody: what they are given is no behaviour.
SILENT = {"cast", "TypeVar", "getLogger", "exception", "debug", "info", "warning"}

Edit = Callable[[ast.AST], ast.AST]


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    target = node.func if isinstance(node, ast.Call) else None
    return target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""


def without(values: list[Any], position: int) -> list[Any]:
    """The list without one of its elements."""
    return values[:position] + values[position + 1 :]


def changed(node: ast.AST, **fields: Any) -> ast.AST:
    """A copy with other fields."""
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def negated(test: ast.expr) -> ast.expr:
    """`not test`, but nothing where the test itself has a mutant that is the same."""
    return ast.UnaryOp(ast.Not(), test)


def edits(node: ast.AST, parent: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every mutant of one node: the operator's name, and what stands in its place."""
    match node:
        case ast.Compare(ops=[*ops]):
            for position, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield "comparison", changed(node, ops=[*ops[:position], other(), *ops[position + 1 :]])
        case ast.Constant(value=bool(value)):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "number", ast.Constant(value + 1)
            yield "number", ast.Constant(value - 1)
        case ast.Constant(value=str(value)) if is_key(node, parent):
            yield "key or SQL", ast.Constant(value[:-1] + ("y" if value[-1:] == "x" else "x") if value else "x")
        case ast.BoolOp(op=op):
            yield "and/or", changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub()):
            yield "drop a not or a sign", node.operand
        case ast.BinOp(op=ast.BitOr()):
            yield "drop an operand", node.left
            yield "drop an operand", node.right
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", changed(node, op=ARITHMETIC[type(op)]())
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield "negate a condition", changed(node, test=negated(node.test))
        case ast.comprehension(ifs=[*tests]) if tests:
            for position in range(len(tests)):
                yield "drop a filter", changed(node, ifs=without(tests, position))
        case ast.Return(value=value) if value is not None and not (
            isinstance(value, ast.Constant) and value.value is None
        ):
            yield "return None", changed(node, value=ast.Constant(None))
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) if len(parts) > 1 and is_value(node):
            for position in range(len(parts)):
                yield "drop an element", changed(node, elts=without(parts, position))
        case ast.Dict(keys=keys, values=values) if keys:
            for position in range(len(keys)):
                yield (
                    "drop an entry",
                    changed(node, keys=without(keys, position), values=without(values, position)),
                )
        case ast.Call():
            yield from edits_of_call(node)
        case ast.Raise() | ast.AugAssign() | ast.Delete():
            yield "drop a statement", ast.Pass()
        case ast.Expr(value=ast.Call() as call) if called(call) not in SILENT:
            yield "drop a statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "drop a statement", ast.Pass()
        case ast.Break():
            yield "break/continue", ast.Continue()
        case ast.Continue():
            yield "break/continue", ast.Break()


def edits_of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Forget an argument or a link of a chain; take the largest for the smallest."""
    name = called(node)
    if name in SILENT:
        return
    for position, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield "drop a keyword", changed(node, keywords=without(node.keywords, position))
    if name in LISTS and len(node.args) > 1:
        for position in range(len(node.args)):
            yield "drop an argument", changed(node, args=without(node.args, position))
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        yield "drop a call of a chain", node.func.value
    if name in ("min", "max"):
        yield "min/max", changed(node, func=ast.Name("max" if name == "min" else "min", ast.Load()))


def is_key(node: ast.AST, parent: ast.AST) -> bool:
    """Whether a text is a key or SQL, and no message."""
    match parent:
        case ast.Dict(keys=keys):
            return node in keys
        case ast.Subscript() | ast.Compare():
            return True
        case ast.Call():
            return called(parent) in TEXTS
    return False


def is_value(node: ast.AST) -> bool:
    """Whether a tuple or list is read, not assigned to."""
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


def parts(node: ast.AST, span: tuple[int, int] = (0, 0)) -> Iterator[tuple[ast.AST, ast.AST, tuple[int, int]]]:
    """Every node with its parent and the lines of its statement, without what no mutant may touch."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params", "type_comment"):
            continue
        if isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not untouched(child, node):
                lines = span_of(child) if isinstance(child, ast.stmt) else span
                yield child, node, lines
                yield from parts(child, lines)


def span_of(statement: ast.stmt) -> tuple[int, int]:
    """The lines of a statement, without those of its body."""
    body: list[ast.stmt] = getattr(statement, "body", [])
    end = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return statement.lineno, max(end, statement.lineno)


def untouched(node: ast.AST, parent: ast.AST) -> bool:
    """Docstrings, types, overloads, protocols, logs."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.FunctionDef(decorator_list=[ast.Name(id="overload"), *_]):
            return True
        case ast.ClassDef(bases=[ast.Name(id="Protocol" | "TypedDict"), *_]):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Call() if called(node) in SILENT:
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp()):
            return isinstance(parent, ast.Module) and name[0].isupper() and not name.isupper()  # a type alias
        case ast.Subscript(value=ast.Name(id=name)) if name in ("dict", "list", "Any", "type", "defaultdict"):
            return True
    return False


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Every mutant of one file."""
    tree = ast.parse(source)
    places = {id(node): index for index, node in enumerate(ast.walk(tree))}
    excluded = no_cover(tree, source)
    for node, parent, span in parts(tree):
        line = getattr(node, "lineno", None) or getattr(getattr(node, "iter", None), "lineno", 0)
        if line in excluded:
            continue
        seen = set()
        for variant, (operator, made) in enumerate(edits(node, parent)):
            after = shown(made)
            if after not in seen:
                seen.add(after)
                yield Mutant(path, line, places[id(node)], operator, variant, shown(node), after, span)


def shown(node: ast.AST) -> str:
    """A node as one line of code."""
    if isinstance(node, ast.If | ast.While):
        return f"if {ast.unparse(node.test)}"
    return re.sub(r"\s+", " ", ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))))


def no_cover(tree: ast.Module, source: str) -> set[int]:
    """The lines of statements that are marked as impossible."""
    marked = {number for number, line in enumerate(source.splitlines(), 1) if "pragma: no cover" in line}
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno in marked
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def mutated(source: str, mutant: Mutant | None) -> str:
    """The file with one change; with none, only its layout differs."""
    tree = ast.parse(source)
    if mutant is None:
        return ast.unparse(tree)
    nodes = list(ast.walk(tree))
    target = nodes[mutant.index]
    for parent in nodes:
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, made_of(target, parent, mutant))
            elif isinstance(value, list) and any(child is target for child in value):
                value[next(i for i, child in enumerate(value) if child is target)] = made_of(target, parent, mutant)
            else:
                continue
            return ast.unparse(ast.fix_missing_locations(tree))
    raise LookupError(str(mutant))


def made_of(node: ast.AST, parent: ast.AST, mutant: Mutant) -> ast.AST:
    """What the mutant puts in the place of the node."""
    return next(made for variant, (_, made) in enumerate(edits(node, parent)) if variant == mutant.variant)


# ------------------------------------------------------------------------------------------- lines and tests
@dataclass
class Coverage:
    """Which tests run which lines, and how long each takes."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    @cached_property
    def busy(self) -> Counter[str]:
        """How many lines each test runs: those that run many look at much."""
        return Counter(test for lines in self.lines.values() for tests in lines.values() for test in tests)

    def contexts(self, path: str, line: int, span: tuple[int, int] | None = None) -> set[str]:
        """The tests of one line, or of its statement when no line event names it; "" stands for the import."""
        lines = self.lines.get(path, {})
        found = set(lines.get(line, ()))
        if not found and span:
            found = {test for other in range(span[0], span[1] + 1) for test in lines.get(other, ())}
        return found


class Uses:
    """What uses a name that is bound at import: lines of functions, also by way of other such names."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.trees = {path: ast.parse(source) for path, source in sources.items()}
        self._by_name: dict[str, list[tuple[str, int, str]]] = defaultdict(list)
        for path, tree in self.trees.items():
            for top in tree.body:
                self._note(path, top)

    def _note(self, path: str, top: ast.stmt) -> None:
        for node in ast.walk(top):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                name = node.id if isinstance(node, ast.Name) else node.attr
                for owner in defined(top):
                    self._by_name[name].append((path, node.lineno, owner))

    def lines(self, path: str, line: int) -> set[tuple[str, int]]:
        """The lines that use the name whose definition holds this line."""
        top = next((top for top in self.trees[path].body if top.lineno <= line <= (top.end_lineno or 0)), None)
        waiting = list(defined(top)) if top is not None else []
        names, found = set(waiting), set()
        while waiting:
            for user, at, owner in self._by_name[waiting.pop()]:
                found.add((user, at))
                if owner not in names:
                    names.add(owner)
                    waiting.append(owner)
        return found


def defined(top: ast.stmt) -> list[str]:
    """The names that a statement of a module binds."""
    match top:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return ["<module>"]


def tests_of(mutant: Mutant, coverage: Coverage, uses: Uses) -> list[str]:
    """The tests that run a mutant's line, or what it defines; the busiest first, spread over their files."""
    found = coverage.contexts(mutant.path, mutant.line, mutant.span)
    if found == {""}:  # at import only
        for path, line in uses.lines(mutant.path, mutant.line):
            found |= coverage.contexts(path, line)
        if found == {""}:
            found = set(coverage.seconds)
    found.discard("")
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(found, key=lambda test: (coverage.seconds.get(test, 1.0) > SLOW, -coverage.busy[test], test)):
        by_file[test.split("::")[0]].append(test)
    own = f"/test_{Path(mutant.path).stem}.py"
    columns = sorted(by_file.values(), key=lambda tests: (own not in tests[0], -len(tests), tests[0]))
    rows = (*itertools.zip_longest(*columns[:FILES]), *itertools.zip_longest(*columns[FILES:]))
    return [test for row in rows for test in row if test]


# ---------------------------------------------------------------------------------------------- one pytest run
class OneWorld:
    """A plugin: each test in one world only; and, when asked, coverage by test and the time of each."""

    def __init__(self, coverage: Any = None, only: list[str] | None = None) -> None:
        self.coverage, self.only = coverage, only and {test: place for place, test in enumerate(only)}
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the chosen tests; in a first run, the first world of each."""
        if self.only is not None:
            items[:] = sorted((item for item in items if item.nodeid in self.only), key=lambda i: self.only[i.nodeid])
            return
        kept: dict[str, Any] = {}
        for item in items:
            world = item.callspec.params.get("world") if hasattr(item, "callspec") else None
            key = item.nodeid if world is None else re.sub(rf"([\[-]){re.escape(world)}(?=[\]-])", r"\1*", item.nodeid)
            if key not in kept or (world and WORLDS.index(world) < WORLDS.index(kept[key].callspec.params["world"])):
                kept[key] = item
        chosen = set(map(id, kept.values()))
        items[:] = [item for item in items if id(item) in chosen]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """From here on, lines are this test's."""
        if self.coverage is not None:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """From here on, lines are nobody's."""
        if self.coverage is not None:
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add up the times; remember the first failure."""
        self.seconds[report.nodeid] += report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        """A mutant that cannot be imported is killed by that."""
        if report.failed and not self.failed:
            self.failed = "import"


ARGUMENTS = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "timeout=0", "--no-header"]
ARGUMENTS += ["-p", "pytest_timeout", "-p", "pytest_postgresql.plugin"]


def run_tests(home: Path, server: str, work: Callable[[], Any], limit: float, log: Path) -> Any:
    """Fork, run `work` in the copy at `home`, and return what it returns; None when it takes longer than `limit`."""
    answer = log.with_suffix(".json")
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            os.chdir(home)
            sys.path[:] = [str(home), *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, HERE))]
            sys.setrecursionlimit(sys.getrecursionlimit() + 500)  # for what is on the stack already
            os.environ |= {"AWA_TEST_DATABASE_URL": server, "PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            answer.write_text(json.dumps(work()))
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + limit
    while True:
        done, _ = os.waitpid(child, os.WNOHANG)
        if done:
            if answer.exists():
                return json.loads(answer.read_text())
            return {"failed": "crash", "code": -1}
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


HERE = Path(__file__).resolve().parent


def measured(home: Path, tests: list[str]) -> dict[str, Any]:
    """In the child: run everything once, and say who runs what."""
    import coverage as library
    import pytest

    cov = library.Coverage(
        data_file=None,
        include=[str(home / pattern) for pattern in SCOPE],
        concurrency=["thread", "greenlet"],
        config_file=False,
    )
    plugin = OneWorld(cov)
    cov.start()
    code = pytest.main([*ARGUMENTS, *tests], plugins=[plugin])
    cov.stop()
    data = cov.get_data()
    lines = {
        str(Path(file).relative_to(home)): {
            line: sorted(contexts) for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    return {"code": int(code), "failed": plugin.failed, "lines": lines, "seconds": plugin.seconds}


def tried(home: Path, tests: list[str]) -> dict[str, Any]:
    """In the child: run these tests up to the first failure."""
    import pytest

    plugin = OneWorld(only=tests)
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    code = pytest.main([*ARGUMENTS, *files], plugins=[plugin])
    import awa_sqla

    assert Path(awa_sqla.__file__).is_relative_to(home), awa_sqla.__file__
    return {"code": int(code), "failed": plugin.failed}


# ------------------------------------------------------------------------------------------------- the runners
class Runner:
    """A copy of the project and a server of its own."""

    def __init__(self, number: int, base: Path) -> None:
        from awa_sqla.localpg import LocalPostgres  # only here: the children import the copy's

        self.home = base / f"copy{number}"
        self.log = base / f"run{number}.txt"
        self.home.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.home / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, self.home / name)
        settings = {"max_prepared_transactions": "10", "max_connections": "200"}
        self.postgres = LocalPostgres(settings=settings).start()
        self.url = self.postgres.sqlalchemy_url()
        self.killers: Counter[str] = Counter()

    def measure(self, tests: list[str]) -> Coverage:
        """Who runs what."""
        got = run_tests(self.home, self.url, lambda: measured(self.home, tests), 1800, self.log)
        if not got or got["code"]:
            raise SystemExit(f"the tests fail without any mutant\n{self.log.read_text()[-4000:]}")
        lines = {path: {int(line): tests for line, tests in found.items()} for path, found in got["lines"].items()}
        return Coverage(lines, got["seconds"])

    def judge(self, mutant: Mutant | None, path: str, tests: list[str], coverage: Coverage) -> dict[str, Any]:
        """Killed, timed out or survived; by which test, after how long."""
        started = time.monotonic()
        file = self.home / path
        source = file.read_text()
        limit = LIMIT + (8 * sum(coverage.seconds.get(test, 0.1) for test in tests) if len(tests) > CAP else 0)
        try:
            file.write_text(mutated(source, mutant))
            for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                cached.unlink()
            got = run_tests(self.home, self.url, lambda: tried(self.home, tests), limit, self.log)
        finally:
            file.write_text(source)
        verdict = "timed out" if got is None else "survived" if got["code"] in (0, 5) else "killed"
        by = "" if got is None else got["failed"]
        self.killers[by] += verdict == "killed"
        return {"verdict": verdict, "by": by, "seconds": round(time.monotonic() - started, 1)}

    def first(self, tests: list[str]) -> list[str]:
        """Those that have killed others and the busiest, of a few files."""
        chosen = sorted(tests[: 4 * CAP], key=lambda test: -self.killers[test])[:CAP]
        files = list(dict.fromkeys(test.split("::")[0] for test in chosen))[:FILES]
        return [test for test in chosen if test.split("::")[0] in files]


# --------------------------------------------------------------------------------------------------- the whole
def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=300, help="how many mutants (300)")
    parser.add_argument("--seed", type=int, default=2026, help="of the shuffle (2026)")
    parser.add_argument("--jobs", type=int, default=2, help="runners at a time (2)")
    parser.add_argument("--minutes", type=float, default=0, help="start no mutant after this long")
    parser.add_argument("--control", type=int, default=10, help="unchanged copies among the mutants (10)")
    parser.add_argument("--only", metavar="GLOB", help="mutants of one place, as in 'cancel.py:6*'; no sample")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="the tests to choose from")
    parser.add_argument("--coverage", type=Path, help="keep which test runs which line here, or take it from here")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts that are in --out already")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"), help="every verdict, as JSON")
    return parser.parse_args()


def main() -> None:
    """Sample, run, report."""
    options = arguments()
    sources = {
        str(file.relative_to(ROOT)): file.read_text() for pattern in SCOPE for file in sorted(ROOT.glob(pattern))
    }
    everything = [mutant for path, source in sources.items() for mutant in mutants_of(path, source)]
    chooser = random.Random(options.seed)
    chooser.shuffle(everything)
    sample = everything[: options.sample]
    if options.only:
        sample = [mutant for mutant in everything if fnmatch.fnmatch(mutant.place, options.only)]
    if options.list:
        for mutant in sorted(sample, key=lambda mutant: (mutant.path, mutant.line)):
            print(mutant)
        print(f"{len(sample)} of {len(everything)} mutants; {dict(Counter(m.operator for m in sample))}")
        return
    controls = 0 if options.only else options.control
    work: list[Mutant | None] = [*sample]
    for number in range(controls):
        work.insert((number + 1) * len(sample) // (controls + 1), None)
    Session(options, sources, work, len(everything), chooser).run()


def key_of(verdict: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a mutant the same one in another run."""
    return tuple(verdict.get(name) for name in ("path", "line", "index", "operator", "variant", "after"))


class Session:
    """One whole run of this script."""

    def __init__(
        self,
        options: argparse.Namespace,
        sources: dict[str, str],
        work: list[Mutant | None],
        of: int,
        chooser: random.Random,
    ) -> None:
        self.options, self.sources, self.work, self.of, self.chooser = options, sources, work, of, chooser
        self.verdicts: list[dict[str, Any]] = []
        self.started = time.monotonic()

    def run(self) -> None:
        """Start the runners, measure once, share the work out."""
        os.environ.pop("AWA_TEST_DATABASE_URL", None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the others take their time to be imported
        self.known_verdicts()
        with tempfile.TemporaryDirectory(prefix="awa-mutants-") as base:
            runners = [Runner(number, Path(base)) for number in range(self.options.jobs)]
            # The servers are up; no child may know the modules that started them.
            for name in [name for name in sys.modules if name.split(".")[0] in ("awa_sqla", "tests")]:
                del sys.modules[name]
            for name in LIBRARIES:
                importlib.import_module(name)
            try:
                self.coverage = self.known_coverage() or runners[0].measure(self.options.tests)
                if self.options.coverage:
                    self.options.coverage.write_text(json.dumps(asdict(self.coverage)))
                self.uses = Uses(self.sources)
                print(f"{len(self.coverage.seconds)} tests in {sum(self.coverage.seconds.values()):.0f} s", flush=True)
                for second in (False, True):
                    self.round(runners, second)
            finally:
                for runner in runners:
                    runner.postgres.stop()
        self.report()

    def known_verdicts(self) -> None:
        """What an earlier run has found need not be found again."""
        self.verdicts = [asdict(one) if one else {"control": True} for one in self.work]
        if self.options.resume and self.options.out.exists():
            known = {key_of(one): one for one in json.loads(self.options.out.read_text()) if "control" not in one}
            self.verdicts = [known.get(key_of(verdict), verdict) for verdict in self.verdicts]

    def known_coverage(self) -> Coverage | None:
        """That of an earlier run, if it was kept."""
        if not self.options.coverage or not self.options.coverage.exists():
            return None
        known = json.loads(self.options.coverage.read_text())
        lines = {path: {int(line): tests for line, tests in found.items()} for path, found in known["lines"].items()}
        return Coverage(lines, known["seconds"])

    def round(self, runners: list[Runner], second: bool) -> None:
        """First every mutant against a few tests, then the survivors against the rest of theirs."""
        fork = multiprocessing.get_context("fork")
        self.next, self.results = fork.Value("i", 0), fork.SimpleQueue()
        workers = [fork.Process(target=self.share, args=(runner, second)) for runner in runners]
        for worker in workers:
            worker.start()
        for _ in runners:
            while (found := self.results.get()) is not None:
                number, verdict = found
                self.verdicts[number] |= verdict
                words = "{verdict} | {seconds} s, {ran} of {tests} tests {by}".format(**self.verdicts[number])
                print(number, self.work[number] or "unchanged", "|", words, flush=True)
                self.options.out.write_text(json.dumps(self.verdicts, indent=1))
        for worker in workers:
            worker.join()

    def share(self, runner: Runner, second: bool) -> None:
        """One runner's part of the work: always the next one, in a process of its own."""
        try:
            while not self.options.minutes or time.monotonic() - self.started < 60 * self.options.minutes:
                with self.next.get_lock():
                    number = self.next.value
                    self.next.value += 1
                if number >= len(self.work):
                    break
                mutant, known = self.work[number], self.verdicts[number]
                model = mutant or next(one for one in self.work[number:] if one is not None)
                tests = tests_of(model, self.coverage, self.uses)
                if known.get("verdict") != ("survived" if second else None):
                    continue
                ran = known.get("first", [])
                chosen = [test for test in tests if test not in set(ran)][:REST] if second else runner.first(tests)
                if second and not chosen:
                    continue
                verdict: dict[str, Any] = {"verdict": "not covered", "by": "", "seconds": 0.0}
                if tests:
                    chosen.sort(key=lambda test: -runner.killers[test])
                    verdict = runner.judge(mutant, model.path, chosen, self.coverage)
                verdict |= {"ran": len(ran) + len(chosen), "tests": len(tests), "first": [*ran, *chosen]}
                self.results.put((number, verdict))
        finally:
            self.results.put(None)

    def report(self) -> None:
        """The counts, by file, and the survivors."""
        judged = [verdict for verdict in self.verdicts if "verdict" in verdict]
        mutants = [verdict for verdict in judged if "control" not in verdict]
        controls = [verdict for verdict in judged if "control" in verdict]
        print(f"\n{'file':<28}{'mutants':>8}{'killed':>8}{'timed out':>10}{'survived':>9}{'not covered':>12}")
        for path in [*sorted({verdict["path"] for verdict in mutants}), ""]:
            found = Counter(verdict["verdict"] for verdict in mutants if path in ("", verdict["path"]))
            counts = [found[word] for word in ("killed", "timed out", "survived", "not covered")]
            name = path.removeprefix("awa_sqla/") or "all"
            print(f"{name:<28}{sum(counts):>8}{counts[0]:>8}{counts[1]:>10}{counts[2]:>9}{counts[3]:>12}")
        dead = sum(verdict["verdict"] in ("killed", "timed out") for verdict in mutants)
        print(f"\n{dead} of {len(mutants)} killed: {dead / max(1, len(mutants)):.1%}; {self.of} mutants in all")
        print(f"controls: {sum(verdict['verdict'] == 'survived' for verdict in controls)} of {len(controls)} pass")
        hasty = sum(verdict["verdict"] == "survived" and verdict["ran"] < verdict["tests"] for verdict in mutants)
        if hasty:
            print(f"{hasty} of the survivors have not met all of their tests")
        for verdict in sorted(mutants, key=lambda verdict: (verdict["path"], verdict["line"])):
            if verdict["verdict"] in ("survived", "not covered"):
                print(
                    f"{verdict['verdict']}: {verdict['path']}:{verdict['line']} {verdict['operator']}: "
                    f"{verdict['before']}  ->  {verdict['after']}"
                )


if __name__ == "__main__":
    main()
