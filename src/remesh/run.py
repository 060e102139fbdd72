"""``python -m remesh.run`` is ``remesh run``, as ``python -m torch.distributed.run`` is torchrun."""

from remesh.cli.run import run

if __name__ == "__main__":
    run(prog_name="remesh run")
