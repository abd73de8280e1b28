"""The dense SwiGLU MLP of layers without experts."""

from torch import Tensor, nn
from torch.nn import functional as F


class DenseMLP(nn.Module):
    """One MLP that every token passes, in the layers named by ``model.dense_layers`` and ``model.moe_every``."""

    def __init__(self, width: int, *, hidden_width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden_width, bias=False)
        self.up_proj = nn.Linear(width, hidden_width, bias=False)
        self.down_proj = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return ``down(silu(gate(x)) · up(x))``, (B, S, D)."""
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
