"""A script as torchrun starts them, that knows nothing of us and needs no torch: tells its surroundings, then acts.

Usage: plain.py FOLDER ACTION[@RANK]...; an action with a rank is that rank's alone. FOLDER takes what it tells.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def act(action: str, folder: Path) -> None:
    """Do what the command line says."""
    match action:
        case "raise-once":
            with contextlib.suppress(FileExistsError):
                (folder / "raised").touch(exist_ok=False)
                raise ValueError("the sky is falling, once")
        case "wait-for-2" | "wait-for-4" | "wait-for-5" | "wait-for-8":
            while len(list(folder.glob("[0-9]*.json"))) < int(action[-1]):
                time.sleep(0.02)
        case "end-when-told":
            while not (folder / "end").exists():
                time.sleep(0.02)
        case "fail-when-told":
            while not (folder / "fail").exists():
                time.sleep(0.02)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                sys.exit(1)
        case "sleep":
            time.sleep(600)
        case "raise":
            raise ValueError("the sky is falling")
        case "exit":
            sys.exit(3)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / "stubborn").touch()
            time.sleep(600)
        case "when-stubborn":
            while not (folder / "stubborn").exists():
                time.sleep(0.02)
        case "record":
            report("ValueError: recorded", "Traceback: as the script saw it")


def report(message: str, traceback: str) -> None:
    """Fail as a function under torch's ``record`` does."""
    extra = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
    with Path(os.environ["TORCHELASTIC_ERROR_FILE"]).open("w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    sys.exit(1)


def main() -> None:
    """Tell, then act."""
    folder, *actions = sys.argv[1:]
    rank = os.environ["RANK"]
    name = f"{time.time_ns()}-{os.getpid()}.json"
    (Path(folder) / f".{name}").write_text(json.dumps({"pid": os.getpid(), "argv": sys.argv[2:], **os.environ}))
    (Path(folder) / f".{name}").rename(Path(folder) / name)
    print(f"rank {rank} says hello", flush=True)
    for action in actions:
        what, _, at_rank = action.partition("@")
        if at_rank in ("", rank):
            act(what, Path(folder))


if __name__ == "__main__":
    main()
