"""What keeps the quick tests quick: a file whose tests compile more than their share fails."""

import pathlib

import jax
import pytest

from tests import compilations


def test_a_file_that_compiles_more_than_its_share_fails(request, monkeypatch):
    monkeypatch.setattr(compilations, "JAX", jax.__version__)
    compilations.begin(request.node)
    jax.jit(lambda x: x + 1)(1.0)
    compilations.check(request.node)
    monkeypatch.setitem(compilations.MORE, "test_compilations.py", 1)
    compilations.begin(request.node)
    jax.jit(lambda x: x + 2)(1.0)
    with pytest.raises(pytest.fail.Exception, match=r"tests/test_compilations\.py have compiled \d+ .* share is 1\."):
        compilations.check(request.node)


@pytest.mark.slow
def test_slow_tests_compile_what_they_need(request, monkeypatch):
    monkeypatch.setitem(compilations.MORE, "test_compilations.py", 0)
    before = dict(compilations._counts)
    compilations.begin(request.node)
    jax.jit(lambda x: x + 3)(1.0)
    compilations.check(request.node)
    assert compilations._counts == before


def test_only_files_that_are_there_have_a_share_of_their_own():
    assert not [name for name in compilations.MORE if not (pathlib.Path(__file__).parent / name).is_file()]
