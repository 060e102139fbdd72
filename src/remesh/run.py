"""``python -m remesh.run`` is ``remesh run``, as ``python -m torch.distributed.run`` is torchrun."""

from remesh.cli.quiet import import_quietly

run = import_quietly("remesh.cli.run").run

if __name__ == "__main__":
    run(prog_name="remesh run")
