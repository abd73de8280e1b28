"""The values that parameters start from: a pure function of a parameter's name, its shape and the run's seed.

| parameter                                                              | start                            |
|------------------------------------------------------------------------|----------------------------------|
| weights of ``embed``, ``lm_head``, every ``*_proj``, the router; ``w_*`` | normal(0, init_std), cut at 3 std |
| every ``*norm.weight``                                                 | 1                                |
| every ``*_proj.bias``; the buffer ``expert_bias``                      | 0                                |

No matrix is scaled by depth. Sources: matrices as in OLMoE's training configuration (allenai/OLMoE 525672c: init_fn
normal, init_std 0.02, init_cutoff_factor 3), of which transformers leaves out the cut; norms and biases as in
transformers 5, modeling_utils.py, PreTrainedModel._init_weights; expert_bias as in DeepSeek-V3 (arXiv 2412.19437).
"""

import hashlib

import torch
from torch import Tensor, nn

CUTOFF_STD = 3.0  # a draw lies within this many standard deviations


def initial_value(name: str, shape: torch.Size, *, init_std: float, seed: int) -> Tensor:
    """Return the fp32 CPU tensor that parameter ``name`` starts from.

    Every name has a random stream of its own, so a parameter starts from the same values whatever other layers the
    model has, wherever it will live and however it is sharded.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little"))
    value = torch.empty(shape, dtype=torch.float32)
    bound = CUTOFF_STD * init_std
    return nn.init.trunc_normal_(value, std=init_std, a=-bound, b=bound, generator=generator)
