"""Entry point of ``python -m remesh``, the ``remesh`` command."""

from remesh.cli import main

if __name__ == "__main__":
    main(prog_name="remesh")
