"""Text of users' files that several tests write."""

NET = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
    def forward(self, x, scale=1.0):
        return self.linear(x) * scale
"""
