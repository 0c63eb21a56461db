"""What makes a process compute the same bits twice. Trainer ranks and engines call it before their first tensor.

Random numbers need nothing here: a rank draws from its own seed and its state is in the checkpoint, a sample's noise
from a generator of its own, and the adapter from the run's seed alone.
"""

import os

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_deterministic(deterministic_mode: bool, device: str) -> None:
    """Set this process up for the same bits. device: cpu or cuda.

    On the CPU one compute thread, whatever the mode: sums then have one order on any machine. In deterministic mode
    torch takes deterministic kernels alone and an operation that has none raises RuntimeError with its name; on cuda
    cuDNN does not pick kernels by timing, and cuBLAS has a fixed workspace (torch's reproducibility notes), which
    must be set before the process first multiplies matrices there. Outside it torch's own defaults hold.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(deterministic_mode)
    torch.backends.cudnn.deterministic = deterministic_mode
    if deterministic_mode:
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault(_WORKSPACE, ":4096:8")
