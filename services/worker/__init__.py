"""The muscle of one replica: model, attention, masks, sampling. The only part that imports torch."""

import os

# After a parallel loop OpenMP's threads spin for milliseconds in case another follows. On a machine with more to do than
# cores, such as this one with its gateway and scheduler, a spinning thread keeps the core from the thread it waits for: a step
# took 217 ms rather than 30 (2 busy cores, 135 M parameters). A short spin covers the gaps within a step and costs 5 % on an
# idle machine. Read when torch loads its OpenMP library, hence here.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
