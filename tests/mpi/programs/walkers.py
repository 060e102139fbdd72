"""Sampling by emcee with the pool of schwimmbad: two packages that know nothing of us."""

import hashlib
import sys
import time

import emcee
import numpy as np
import schwimmbad
from gate import wait_at_gate


def log_density(x: np.ndarray, pause_s: float) -> float:
    if pause_s:
        time.sleep(pause_s)
    return float(-0.5 * np.sum(x * x / np.array([1.0, 2.0, 3.0])))


def main(steps: int, pause_s: float) -> None:
    with schwimmbad.MPIPool() as pool:
        if not pool.is_master():
            pool.wait()
            sys.exit(0)
        start = np.random.default_rng(1).normal(size=(12, 3))
        np.random.seed(2)
        sampler = emcee.EnsembleSampler(12, 3, log_density, args=(pause_s,), pool=pool)
        for number, _ in enumerate(sampler.sample(start, iterations=steps), 1):
            if number == steps - 1:
                wait_at_gate()
        print("answer", hashlib.sha256(sampler.get_chain().tobytes()).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
