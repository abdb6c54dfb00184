"""A watched run without end, for somebody to interrupt; says when it has begun. Argument: where to record it."""

import signal
import sys
import time

import torch
from torch import nn

from featlearn.monitoring.entry import watch

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
with watch(model, probe=(torch.randn(6, 4), torch.arange(6) % 2), out=sys.argv[1], every=5, budget=None) as seen:
    print("entered", flush=True)
    for _ in range(30_000):
        seen.step(loss=1.0)
        time.sleep(0.001)
