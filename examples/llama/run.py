"""Two nodes train a Llama under FSDP2 x TP x PP; one is killed and comes back; the loss curve goes on.

    python examples/llama/run.py [--steps 100] [--folder runs/llama]

Prints the loss, and what happened. Its curve, live or afterwards: remesh dashboard runs/llama/events
"""

import argparse
import shutil
import sys
from pathlib import Path

from remesh.testbed.local_job import LocalJob

SCRIPT = Path(__file__).with_name("train.py")
KEPT, KILLED = "node-a", "node-b"
QUIET_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2, help="workers on each node, an even number")
    parser.add_argument("--folder", type=Path, default=Path("runs/llama"))
    options = parser.parse_args()
    shutil.rmtree(options.folder / "events", ignore_errors=True)
    script = [str(SCRIPT), "--steps", str(options.steps)]
    killed, told = False, set()
    with LocalJob(options.folder, script, workers_per_node=options.workers) as job:
        for node in (KEPT, KILLED):
            job.start_node(node)
        for event in job.follow(QUIET_S):
            match event["kind"]:
                case "generation" if event["number"] not in told:
                    told.add(event["number"])
                    axes = " x ".join(f"{axis}={size}" for axis, size in event["axes"].items())
                    print(f"mesh {axes} from step {event['step']}: {event['reason']}", flush=True)
                case "step" if ("step", event["step"]) not in told:
                    told.add(("step", event["step"]))
                    print(f"step {event['step']}: loss {event['loss']:.4f}", flush=True)
                    if not killed and event["step"] >= options.steps // 3:
                        killed = bool(job.kill_node(KILLED))
                        print(f"{KILLED} killed", flush=True)
                    elif len(told & {1, 2, 3}) == 2 and job.agents[KILLED].poll() is not None:
                        job.start_node(KILLED)
        codes = {node: agent.wait() for node, agent in job.agents.items()}
        if any(codes.values()):
            print(f"agents ended with {codes}\n{job.describe_logs()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
