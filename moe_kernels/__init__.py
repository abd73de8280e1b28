"""Routed expert MLPs: what "routed" means, and how to compute it fast. Imports nothing else of this project."""

from moe_kernels.api import moe_experts
from moe_kernels.dispatch import Backend, BackendName, KernelUnavailable, arch_of, resolve_backend
from moe_kernels.problem import MoEProblem
from moe_kernels.reference.experts import moe_experts_ref
from moe_kernels.routing.expert_choice import route_expert_choice
from moe_kernels.routing.kinds import Rounding, RoutingKind
from moe_kernels.routing.plan import Routing, RoutingPlan, check_plan, row_capacity
from moe_kernels.routing.token_rounding import route_token_rounding
from moe_kernels.routing.top_k import route_top_k

__all__ = [
    "Backend",
    "BackendName",
    "KernelUnavailable",
    "MoEProblem",
    "Rounding",
    "Routing",
    "RoutingKind",
    "RoutingPlan",
    "arch_of",
    "check_plan",
    "moe_experts",
    "moe_experts_ref",
    "resolve_backend",
    "route_expert_choice",
    "route_token_rounding",
    "route_top_k",
    "row_capacity",
]
