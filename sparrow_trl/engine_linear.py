"""
A linear layer with a LoRA, computed as the rollout engine computes it: with W + BA rounded to the engine's dtype.

What a LoRA adds is often smaller than the rounding of W to bfloat16, of which a student that keeps W and BA apart
knows nothing: it would learn something that the engine then lacks. [`EngineLinear`] therefore multiplies by the
engine's own weights, and gives A and B the gradients that they would have without rounding (straight through).
"""

from collections.abc import Callable

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F


# Name that PEFT gives to a model's first adapter.
ADAPTER_NAME = "default"


class EngineLinear(nn.Module):
    """
    Takes the place of PEFT's layer in a forward pass.

    Args:
        layer (`peft.tuners.lora.LoraLayer`):
            The linear layer with its LoRA.
        weight (`Callable[[], torch.Tensor]`):
            Gives W + BA as the engine has it.
    """

    def __init__(self, layer: LoraLayer, weight: Callable[[], torch.Tensor]):
        super().__init__()
        self.layer = layer
        self._weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x W'^T` and the bias of the layer."""
        output = _Linear.apply(x, self._weight, self.layer.get_base_layer().bias)
        dropout = self.layer.lora_dropout[ADAPTER_NAME]
        drops = dropout.training and not isinstance(dropout, nn.Identity)
        if torch.is_grad_enabled() or drops:
            # The gradient of x is that of W', which has BA in it already.
            x = x.detach()
            delta = self._delta(dropout(x))
            with torch.no_grad():
                undropped = self._delta(x) if drops else delta.detach()
            output = output + (delta - undropped).to(output.dtype)
        return output

    def _delta(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.layer.lora_A[ADAPTER_NAME], self.layer.lora_B[ADAPTER_NAME]
        return b(a(x.to(a.weight.dtype))) * self.layer.scaling[ADAPTER_NAME]


class _Linear(torch.autograd.Function):
    """`x W'^T + b` with a W' that has no gradient and is made anew for the backward pass, so that nothing keeps it."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.weight, ctx.dtype = weight, x.dtype
        made = weight()
        if not torch.is_autocast_enabled(x.device.type):
            made = made.to(x.dtype)
        return F.linear(x, made, bias)

    @staticmethod
    def backward(ctx, gradient):
        return (gradient @ ctx.weight().to(gradient.dtype)).to(ctx.dtype), None, None
