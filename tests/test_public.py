"""The public names: complete, sorted, documented, and typed."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import awa_sqla
import awa_sqla.asyncio
import awa_sqla.errors
import awa_sqla.schema

PACKAGE = Path(awa_sqla.__file__).parent


@pytest.mark.parametrize(
    "module", [awa_sqla, awa_sqla.asyncio, awa_sqla.errors, awa_sqla.schema], ids=lambda m: m.__name__
)
def test_all_is_sorted_and_every_name_is_there_and_documented(module):
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        thing = getattr(module, name)
        assert not callable(thing) or inspect.getdoc(thing), name


def test_all_holds_every_public_class_and_function_of_the_package():
    offered = {
        name for name, thing in vars(awa_sqla).items() if not name.startswith("_") and not inspect.ismodule(thing)
    }
    assert offered == set(awa_sqla.__all__)


def test_every_error_is_exported_and_drawn_in_the_tree():
    for name in awa_sqla.errors.__all__:
        assert getattr(awa_sqla, name) is getattr(awa_sqla.errors, name)
        assert name in (awa_sqla.errors.__doc__ or "")


def test_the_async_verbs_take_what_the_sync_ones_take():
    for name in awa_sqla.asyncio.__all__:
        ours, theirs = getattr(awa_sqla, name), getattr(awa_sqla.asyncio, name)
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)
        assert inspect.iscoroutinefunction(theirs) is (name != "enqueue")


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()
