"""What does ``remesh ckpt convert`` do with files that only their program knows? Each pair ends in one line to show."""

from __future__ import annotations

from pathlib import Path

from remesh.checkpoint.plain import save
from remesh.checkpoint.run.conversion import Format, open_any
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.checkpoint.storage import Location
from remesh.errors import ConfigError
from remesh.integrations.deepspeed import read_zero
from remesh.integrations.deepspeed_universal import BUFFERS, write_universal
from remesh.integrations.megatron_legacy import read_megatron_legacy, save_megatron

FROM_PROGRAM = ("deepspeed-zero", "megatron-legacy")
TO_PROGRAM = ("deepspeed-universal",)


def convert_from(source: Location, target: Location, to: str, origin: str) -> str:
    """Make a checkpoint of ours from what a program wrote."""
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


def convert_to(source: Location, target: Location, to: str) -> str:
    """Make what a program reads from a checkpoint of any format."""
    if not isinstance(target, Path):
        raise ConfigError(f"writing {target} for {to}: expected a local folder; copy it after that")
    done = write_universal(open_any(source), target)
    told = [
        f"{done.num_parameters} parameters in {done.tag}; DeepSpeed resumes from {target} with "
        '"checkpoint": {"load_universal": true}, under ZeRO 1, 2 or 3, on any number of ranks'
    ]
    if done.buffers:
        told.append(
            f"DeepSpeed restores no buffers from such a folder; for {len(done.buffers)} of them call "
            f"engine.module.load_state_dict(client_state[{BUFFERS!r}], strict=False)"
        )
    if done.set_by_script:
        told.append(f"as the script sets them under ZeRO 3, since groups differ: {', '.join(done.set_by_script)}")
    if done.left_out:
        told.append("left out, for their places in the client state are not known: " + ", ".join(done.left_out))
    return "\n".join(told)
