"""Versions stand side by side: build/docs/<version>/, a list of them for the menu, and a front door to the newest."""

from __future__ import annotations

import json
from pathlib import Path

from sphinx.application import Sphinx

_DOOR = '<!doctype html><meta charset="utf-8"><title>Remesh</title><meta http-equiv="refresh" content="0; url={}/">\n'


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", _list_versions)
    return {"parallel_read_safe": True}


def _list_versions(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    roof = Path(app.outdir).parent
    found = sorted((page.parent.name for page in roof.glob("*/objects.inv")), key=_order, reverse=True)
    rows = [{"name": name, "version": name, "url": f"../{name}/"} for name in found]
    (roof / "versions.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (roof / "index.html").write_text(_DOOR.format(found[0]), encoding="utf-8")


def _order(name: str) -> list[tuple[bool, int, str]]:
    """1.10.0 is behind 1.9.0."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
