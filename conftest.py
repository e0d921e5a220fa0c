"""Settings of every test process."""

import os

import torch

# Two workers share two cores; with more runnable threads than cores every parallel region of torch waits milliseconds.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
