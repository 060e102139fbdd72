"""Image of a rank's program, written into the rank's folder of a checkpoint, and its entry in the manifest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from remesh.carried import images
from remesh.wire.messages import Message

IMAGE: Final = "image"
"""Folder of the process image inside a rank's folder."""


def dump_into(frozen: images.Frozen, folder: Path, request: Message) -> dict[str, Any]:
    """Write the image that the coordinator asks for into the rank's ``folder``; returns its part of the manifest."""
    previous = None
    if request["previous"] is not None:
        previous = Path(request["previous"]) / folder.name / IMAGE
        previous = previous if previous.is_dir() else None
    made = images.dump_image(
        frozen,
        folder / IMAGE,
        previous=previous,
        compress=bool(request["compress"]),
        track=bool(request["track"]),
    )
    return {
        "num_bytes": made.num_bytes,
        "num_pages": made.num_pages,
        "num_pages_inherited": made.num_pages_inherited,
        "builds_upon": sorted(int(Path(each).parents[1].name) for each in made.ancestors),
        "shared_names": list(made.shared_names),
        "written_files": [asdict(each) for each in made.written_files],
        "seconds": dict(made.seconds),
    }
