"""The bytes that one block keeps from its forward to its backward, and those it needs while it runs.

Counted from what the code does, tensor by tensor: model/ for the blocks, moe_kernels/layer_op.py and the backends for
the experts, training/parallel.py for what is recomputed. Everything outside of a block (parameters, their sharding, the
head) is memory.py. Counted are tensors as large as a share of every token, pair or row; what is as small as the experts
or the sequences is not.
"""

from dataclasses import dataclass, replace
from math import ceil

from model.attend import AttentionKernel
from model.config import ModelConfig, QKNorm
from model.counting import routed_rows
from moe_kernels import BackendName
from training.build import Kernels
from training.config import ActivationCheckpointing, Precision, RunConfig

_FP32 = 4
_INT32 = 4
_DSCORE_COLUMNS = 128  # of the narrowest tiles in down_backward: each column of tiles leaves a part of dscore


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the bytes of a block follow from; letters as in docs/notation.md."""

    model: ModelConfig
    T: int
    S: int
    R: int
    c: int  # bytes of a number that blocks compute with
    is_portable: bool  # the experts run on torch's grouped products, else on the CuTe kernels
    is_compiled: bool
    checkpointing: ActivationCheckpointing
    recompute_h: bool
    mask_documents: bool
    mask: int  # bytes of a document mask that all layers read

    @property
    def D(self) -> int:
        """The model's width."""
        return self.model.width

    @property
    def queries(self) -> int:
        """H · A, the numbers in a token's queries."""
        return self.model.attention.query_width

    @property
    def keys(self) -> int:
        """G · A, the numbers in a token's keys, and in its values."""
        return self.model.attention.key_width

    @property
    def stream(self) -> int:
        """Bytes of one tensor (T, D)."""
        return self.c * self.T * self.D


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment in the forward or backward of a block that may be the worst, and the bytes that the block has then."""

    name: str
    activations: int  # kept since the forward, or made again
    workspace: int
    has_expert_gradients: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Bytes of one block's activations."""

    kept: int  # from the forward to the backward
    forward: Moment
    backward: tuple[Moment, ...]


def sizes_of(config: RunConfig, kernels: Kernels, *, is_compiled: bool) -> Sizes:
    """Return the sizes of one micro-batch of a run."""
    T, S = config.micro_batch_tokens, config.data.sequence_length
    c = 2 if config.train.precision is Precision.bf16 else _FP32
    # FlexAttention reads a number for every block of queries and keys instead.
    is_bias = config.data.mask_documents and kernels.attention is AttentionKernel.sdpa
    return Sizes(
        model=config.model,
        T=T,
        S=S,
        R=routed_rows(config.model, num_tokens=T),
        c=c,
        is_portable=kernels.backend.name == BackendName.portable.value,
        is_compiled=is_compiled,
        checkpointing=config.parallel.activation_checkpointing,
        recompute_h=config.parallel.recompute_h,
        mask_documents=config.data.mask_documents,
        mask=c * T * S if is_bias else 0,
    )


def block_memory(s: Sizes, layer: int) -> BlockMemory:
    """Return the bytes of block ``layer`` under the run's activation checkpointing."""
    is_moe = s.model.is_moe_layer(layer)
    attention, mlp_norm, mlp = _attention_tensors(s), _mlp_norm_tensors(s), _moe_tensors(s) if is_moe else _dense(s)
    sizes = attention | mlp_norm | mlp
    needed = sizes.keys() - (_RECOMPUTED_BY_COMPILER if s.is_compiled else _UNREAD_BY_EAGER)
    if not s.is_compiled and s.c == _FP32 and s.model.attention.qk_norm is not QKNorm.none:
        needed -= {"q, k"}  # they are what their norm keeps as its input
    kept = _kept(s, needed) & sizes.keys()
    # Recomputation runs the whole block at once; compiled, each part just before it is read. Full checkpointing needs
    # attention's output for the experts' input, and with it all that attention reads.
    in_parts = s.is_compiled and s.checkpointing is not ActivationCheckpointing.full
    in_mlp = kept | (needed & (mlp_norm.keys() | mlp.keys()) if in_parts else needed)
    in_norm = in_mlp - mlp.keys()
    in_attention = (kept | needed) - mlp_norm.keys() - mlp.keys()

    def total(names: set[str]) -> int:
        return sum(sizes[name] for name in names)

    forward, backward = (_moe_forward(s), _moe_backward(s)) if is_moe else (_dense_forward(s), _dense_backward(s))
    mlp_name = "experts" if is_moe else "MLP"
    moments = [
        Moment(name=mlp_name, activations=total(in_mlp), workspace=s.stream + backward),
        Moment(
            name="norm", activations=total(in_norm), workspace=s.stream + _norm_backward(s), has_expert_gradients=True
        ),
        Moment(
            name="attention",
            activations=total(in_attention),
            workspace=s.stream + _attention_backward(s),
            has_expert_gradients=True,
        ),
    ]
    if s.checkpointing is ActivationCheckpointing.full:
        moments.append(Moment(name="recomputation", activations=total(in_mlp), workspace=s.stream + forward))
    in_forward = kept if s.checkpointing is ActivationCheckpointing.none else kept | set(mlp_norm)
    return BlockMemory(
        kept=total(kept),
        forward=Moment(name=mlp_name, activations=total(in_forward), workspace=s.stream + forward),
        backward=tuple(moments),
    )


def evaluation_bytes(s: Sizes, layer: int) -> int:
    """Return the bytes of block ``layer`` in a forward without a backward, at its experts or MLP."""
    before = 2 * s.stream  # the stream, and what its norm makes of it
    if not s.model.is_moe_layer(layer):
        return before + _dense_forward(s)
    moe = _moe_tensors(s)
    # The kernels write no h; torch's products do.
    return before + moe["logits"] + moe["plan"] + moe["scores"] + _moe_forward(replace(s, recompute_h=True))


# Every tensor of a block has a name below. Uncompiled, the backward reads all of them but these; compiled, norms and
# rotations are made again from their inputs, so that the others are not kept. Queries and keys are parts of one tensor
# with the values, and live as long.
_UNREAD_BY_EAGER = {"input", "attention's projection", "mlp input", "routed", "moe output", "dense output"}
_RECOMPUTED_BY_COMPILER = {
    "attention norm",
    "q, k norms",
    "clipped",
    "rotary",
    "attention's projection",
    "mlp norm",
    "routed",
    "moe output",
    "silu, product",
    "dense output",
}


def _kept(s: Sizes, needed: set[str]) -> set[str]:
    """Return the names of the tensors that live from the forward to the backward."""
    if s.checkpointing is ActivationCheckpointing.none:
        return needed
    kept = {"input"}
    if s.checkpointing is ActivationCheckpointing.full:
        return kept
    # What operators return is kept whole; compiled code drops the MoE op's output, which no gradient reads.
    kept |= {"attended", "h", "scores", "logits", "plan"} | (set() if s.is_compiled else {"moe output", "routed"})
    # A block's first, third and fifth product: training/parallel.py.
    kept |= {"q, k", "values", "gate"} | (set() if s.is_compiled else {"dense output"})
    if s.checkpointing is ActivationCheckpointing.elementwise:
        kept |= {"attention's projection", "up"}
    return kept


def _norm(s: Sizes, width: int, groups: int = 1) -> int:
    """Uncompiled: the input in fp32, the reciprocal of each root mean square, the normalised in the input's dtype."""
    return s.T * (width * (_FP32 + s.c) + _FP32 * groups)


def _attention_tensors(s: Sizes) -> dict[str, int]:
    attention = s.model.attention
    tensors = {
        # Uncompiled fp32: the norm's input in fp32 is this tensor itself.
        "input": s.stream,
        "attention norm": _norm(s, s.D),
        "attention norm output": s.stream,
        "q, k": s.c * s.T * (s.queries + s.keys),
        "rotated": s.c * s.T * (s.queries + s.keys),
        "values": s.c * s.T * s.keys,
        "attended": s.T * (s.c * s.queries + _FP32 * attention.num_heads),
        "attention's projection": s.stream,
    }
    if attention.qk_norm is not QKNorm.none:
        per_head = attention.qk_norm is QKNorm.per_head
        groups = (attention.num_heads, attention.num_kv_heads) if per_head else (1, 1)
        tensors["q, k norms"] = _norm(s, s.queries, groups[0]) + _norm(s, s.keys, groups[1])
    if attention.clip_qkv is not None:
        tensors["clipped"] = s.c * s.T * (s.queries + 2 * s.keys)
    if s.c < _FP32:  # cosines and sines are rounded anew for queries and for keys
        tensors["rotary"] = 4 * s.c * attention.head_width * (s.T if s.mask_documents else s.S)
    return tensors


def _mlp_norm_tensors(s: Sizes) -> dict[str, int]:
    return {"mlp input": s.stream, "mlp norm": _norm(s, s.D), "mlp norm output": s.stream}


def _moe_tensors(s: Sizes) -> dict[str, int]:
    moe = s.model.moe
    pairs = s.T * moe.num_experts
    return {
        "logits": _FP32 * pairs + (pairs if moe.normalize_top_k else 0),
        "plan": _INT32 * (3 * s.R + s.T),
        "routed": _routed(s),
        "h": 0 if s.recompute_h else s.c * s.R * 2 * moe.expert_width,
        "scores": _FP32 * s.R,
        "moe output": s.stream,
    }


def _dense(s: Sizes) -> dict[str, int]:
    assert s.model.dense_width is not None
    tensor = s.c * s.T * s.model.dense_width
    return {"gate": tensor, "up": tensor, "silu, product": 2 * tensor, "dense output": s.stream}


def _routed(s: Sizes) -> int:
    """Scores and masks of all pairs; both once more, transposed, for rounding."""
    return s.T * s.model.moe.num_experts * (_FP32 + 2 + _FP32 + 1)


def _moe_forward(s: Sizes) -> int:
    """The workspace of the experts' forward, besides what the backward reads."""
    moe = s.model.moe
    a, rows, h_twice = s.c * s.R * moe.expert_width, s.c * s.R * s.D, 2 * s.c * s.R * moe.expert_width
    h = h_twice if s.recompute_h and s.is_portable else 0  # the CuTe kernels never write an h that is not kept
    pairs = _routed(s)
    phases = [h + a, a + rows, rows + s.stream]
    if s.is_portable:
        is_narrow = s.c < _FP32
        wide_h, wide_rows = (_FP32 * s.R * 2 * moe.expert_width, _FP32 * s.R * s.D) if is_narrow else (0, 0)
        phases = [
            rows + h,
            h + wide_h + 2 * _FP32 * s.R * moe.expert_width + a,
            h + a + rows,
            rows + wide_rows + (_FP32 * s.T * s.D if is_narrow else 0) + s.stream,
        ]
    return pairs + max(phases)


def _moe_backward(s: Sizes) -> int:
    """The workspace of the experts' backward: theirs, the gradients of their weights and of their input."""
    moe = s.model.moe
    a, rows = s.c * s.R * moe.expert_width, s.c * s.R * s.D
    h, dh = 2 * a, 2 * a
    dw_down, dw_gate_up = (
        s.c * moe.num_experts * s.D * moe.expert_width,
        2 * s.c * moe.num_experts * s.D * moe.expert_width,
    )
    dscore = _FP32 * (s.T * moe.num_experts + s.R * ceil(moe.expert_width / _DSCORE_COLUMNS))
    gathered = rows if s.is_portable else 0
    wide_sum = _FP32 * (s.R + s.T) * s.D if s.is_portable and s.c < _FP32 else 0
    # h goes after the first part, whether it was kept or made again.
    made_again = h if s.recompute_h else 0
    gone = 0 if s.recompute_h else h
    phases = [
        made_again + a + gathered,
        made_again + dh + a,
        dh + a + dw_down + gathered - gone,
        dh + dw_down + rows + s.stream + wide_sum - gone,
        dh + dw_down + s.stream + dw_gate_up + gathered - gone,
    ]
    if s.is_portable:
        # swiglu_backward: nine (R, N) in fp32, h's and dh's twice as wide, when it writes dh in the narrow dtype.
        wide = _FP32 * s.R * moe.expert_width
        phases.append(made_again + (11 * wide + a + dh if s.c < _FP32 else 8 * wide))
    return dscore + max(phases)


def _dense_forward(s: Sizes) -> int:
    assert s.model.dense_width is not None
    return s.stream + s.c * s.T * s.model.dense_width


def _dense_backward(s: Sizes) -> int:
    assert s.model.dense_width is not None
    return s.stream + 4 * s.c * s.T * s.model.dense_width + 3 * s.c * s.D * s.model.dense_width


def _norm_backward(s: Sizes) -> int:
    """Gradients of the stream and of the norm's output, and the fp32 tensors of the norm's backward."""
    return 2 * s.stream + (1 if s.is_compiled else 4) * _FP32 * s.T * s.D


def _attention_backward(s: Sizes) -> int:
    """Gradients of the output, of queries, keys and values, and the fp32 sum of the queries' gradient."""
    num_heads = s.model.attention.num_heads
    return s.c * s.T * 2 * (s.queries + s.keys) + _FP32 * s.T * (s.queries + num_heads)
