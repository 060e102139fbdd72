"""Which texts are read before it is said that workers may be forked: all that the author of a script wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from remesh.elasticity.launch.preloading import why_not_forked
from remesh.elasticity.launch.request import Request

WRONG = "import os\nos.environ['OMP_NUM_THREADS'] = '4'\n"


def _why(script: str, *, is_module: bool = False) -> str | None:
    return why_not_forked(Request({"module": is_module}, frozenset(), script, ()))


def _write(folder: Path, **texts: str) -> None:
    """Modules by their names, ``__`` for a dot."""
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_packages_that_are_found_by_the_path_and_not_installed_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``PYTHONPATH=src``, or one that was installed to be edited."""
    names = ("whole_package", "loose_parts", "installed_one")
    for name in names:
        _write(tmp_path / "scripts", **{name: f"import torch\nfrom {name} import settings\n"})
        _write(tmp_path / ("lib/site-packages" if name == "installed_one" else "src"), **{f"{name}__settings": WRONG})
    (tmp_path / "src/whole_package/__init__.py").touch()
    # A script finds its own folder first.
    scripts = {
        name: str((tmp_path / f"scripts/{name}.py").rename(tmp_path / f"scripts/run_{name}.py")) for name in names
    }
    assert [_why(script) for script in scripts.values()] == [None] * 3
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    monkeypatch.syspath_prepend(str(tmp_path / "lib/site-packages"))
    for name in names[:2]:
        assert f"of {name}.settings names OMP_NUM_THREADS" in (_why(scripts[name]) or "it may be forked")
    assert _why(scripts["installed_one"]) is None


def test_the_package_of_a_module_that_is_run_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, outer__train="import torch", main__settings=WRONG)
    (tmp_path / "outer/__init__.py").write_text(WRONG)
    (tmp_path / "main/__main__.py").write_text("import torch\nfrom . import settings\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "of outer names OMP_NUM_THREADS" in (_why("outer.train", is_module=True) or "it may be forked")
    assert "of main.settings names OMP_NUM_THREADS" in (_why("main", is_module=True) or "it may be forked")


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_what_a_site_adds_to_every_python_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, train="import torch", site=WRONG)
    module = ModuleType(name)
    module.__file__ = str(tmp_path / "site.py")
    monkeypatch.setitem(sys.modules, name, module)
    assert f"of {name} names OMP_NUM_THREADS" in (_why(str(tmp_path / "train.py")) or "")
