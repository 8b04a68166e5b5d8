"""The one place that chooses where tensors live."""

import torch


def device() -> torch.device:
    """CUDA if the machine has it, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
