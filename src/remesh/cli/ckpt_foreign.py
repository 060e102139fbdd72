"""Conversions between checkpoints of Remesh and of other programs, for ``remesh ckpt convert``.

Each conversion returns one line to print.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from remesh.checkpoint.foreign.deepspeed import read_zero
from remesh.checkpoint.foreign.deepspeed_universal import BUFFERS, write_universal
from remesh.checkpoint.foreign.megatron_legacy import read_megatron_legacy, save_megatron
from remesh.checkpoint.foreign.megatron_parts import saved_mesh, write_megatron_legacy
from remesh.checkpoint.plain import save
from remesh.checkpoint.run.conversion import Format, open_any
from remesh.checkpoint.run.reader import OpenCheckpoint, open_checkpoint
from remesh.checkpoint.storage import Location
from remesh.foundation.errors import ConfigError


def convert_from(source: Location, target: Location, to: str, origin: str) -> str:
    """Make a Remesh checkpoint from what another program wrote."""
    if not isinstance(source, Path) or to != Format.TORCH_DIST.value:
        raise ConfigError(
            f"converting {source} of {origin}: expected a local folder and --to torch_dist, found --to {to}; "
            "convert the result once more for another format"
        )
    if origin == "deepspeed-zero":
        save(read_zero(source), target)
    else:
        save_megatron(read_megatron_legacy(source), target)
    num_tensors = len(open_checkpoint(target).manifest.tensors)
    return f"{num_tensors} tensors of {origin} in {target}; left out: random numbers of the ranks"


def convert_to(source: Location, target: Location, to: str, tensor: int | None, pipeline: int | None) -> str:
    """Make what a program reads from a checkpoint of any format; for Megatron on so many ranks, or as it was saved."""
    if not isinstance(target, Path):
        raise ConfigError(f"writing {target} for {to}: expected a local folder; copy it after that")
    if to == "megatron-legacy":
        return _to_megatron(open_any(source), target, tensor, pipeline)
    return _to_deepspeed(open_any(source), target)


def _to_megatron(source: OpenCheckpoint, target: Path, tensor: int | None, pipeline: int | None) -> str:
    mesh = saved_mesh(source)
    if pipeline is not None:
        mesh = replace(mesh, pipeline=pipeline, virtual=1)
    mesh = mesh if tensor is None else replace(mesh, tensor=tensor)
    place = write_megatron_legacy(source, target, mesh)
    return (
        f"{mesh.tensor * mesh.pipeline} parts in {place}, for {mesh.tensor} ranks of tensor and {mesh.pipeline} of "
        "pipeline parallelism; left out: random numbers of the ranks, so resume with --ckpt-format torch --no-load-rng"
    )


def _to_deepspeed(source: OpenCheckpoint, target: Path) -> str:
    done = write_universal(source, target)
    lines = [
        f"{done.num_parameters} parameters in {done.tag}; DeepSpeed resumes from {target} with "
        '"checkpoint": {"load_universal": true}, under ZeRO 1, 2 or 3, on any number of ranks; leave '
        "round_robin_gradients out of that config, for DeepSpeed then puts values into other parameters"
    ]
    if done.buffers:
        lines.append(
            f"DeepSpeed restores no buffers from such a folder; for {len(done.buffers)} of them call "
            f"engine.module.load_state_dict(client_state[{BUFFERS!r}], strict=False)"
        )
    if done.set_by_script:
        lines.append(f"as the script sets them under ZeRO 3, since groups differ: {', '.join(done.set_by_script)}")
    if done.left_out:
        lines.append("left out, for their places in the client state are not known: " + ", ".join(done.left_out))
    return "\n".join(lines)
