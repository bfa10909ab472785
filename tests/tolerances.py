"""The one table of tolerances: how far a fast path may be from the float64 reference, by dtype."""

import torch

ABSOLUTE = {torch.float64: 1e-10, torch.float32: 2e-5}
"""Largest absolute difference on outputs and gradients of order one."""
