"""From a profiler's trace to a table of where the time of a step went, whose rows sum to the step.

At every moment the time goes to what the device computes then, in equal shares if it is several things; to exposed
communication if it only communicates; else to waiting for data or to being idle. On the CPU it goes to the innermost
operator of the thread that takes the steps. How traces are recorded is profiling.py.
"""

import gzip
import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

WINDOW = "train/steps"  # the range of the trace that the table is about
DATA = "train/data"  # ranges in which the host waits for a batch
CLIP = "train/clip"

COMMUNICATION = "communication, exposed"
HIDDEN = "communication, hidden"
IDLE = "idle"
DATA_WAIT = "waiting for data"
_EXPERTS_ROW = "experts"
_TEXT_ROWS = 25
HOST = "Python"  # on the CPU: time in no operator
_EXPERTS = re.compile(r"gristmill::moe_experts")
_ATTENTION = re.compile(r"scaled_dot_product|flash_attention|flash_attn|flash_fwd|flash_bwd|fmha|_sdpa_|flex_attention")
_FUSED = re.compile(r"triton_(poi|red|per)_")  # torch.compile's, named after what stood around them
_PRODUCT = re.compile(r"gemm|nvjet|cublas|xmma|splitk", re.IGNORECASE)
_PRODUCT_OPS = re.compile(r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|_grouped_mm)$")
_HEAD = re.compile(r"cross_?entropy|nll_loss|aten::embedding", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What tells a router's product from the head's: the sizes that only they have."""

    num_experts: int
    vocab_size: int


class Busy(NamedTuple):
    """One stretch of a device's or an operator's time, in microseconds, and the row it belongs to."""

    start: float
    end: float
    row: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of one step by row; ``rows`` sum to ``step_s``, what was hidden is beside them."""

    device: str
    num_steps: int
    step_s: float
    rows: dict[str, float]
    communication_hidden_s: float
    kernels: list[dict[str, Any]]  # the longest, with their row and count: to see what was taken for what

    def as_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def as_text(self) -> str:
        """Return it as a table, the largest row first and the smallest together."""
        ranked = sorted(self.rows.items(), key=lambda item: -item[1])
        shown, others = ranked[:_TEXT_ROWS], ranked[_TEXT_ROWS:]
        if others:
            shown.append((f"{len(others)} others", sum(seconds for _, seconds in others)))
        width = max(len(HIDDEN), *(len(row) for row, _ in shown))
        lines = [f"{'mean of ' + str(self.num_steps) + ' steps, ' + self.device:{width}}  {'ms':>9}  {'share':>6}"]
        for row, seconds in shown:
            lines.append(f"{row:{width}}  {seconds * 1e3:9.3f}  {seconds / self.step_s:6.1%}")
        lines.append(f"{'step':{width}}  {self.step_s * 1e3:9.3f}  {1:6.1%}")
        if self.communication_hidden_s > 0:
            lines.append(f"{HIDDEN:{width}}  {self.communication_hidden_s * 1e3:9.3f}  not in the sum")
        return "\n".join(lines) + "\n"


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace, gzipped or not, that have a duration."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def break_down(events: Sequence[dict[str, Any]], sizes: Sizes, *, num_steps: int) -> Breakdown:
    """Return where the time of the ``num_steps`` steps went that the trace's ``train/steps`` range spans.

    Raises: ValueError if the trace has no such range.
    """
    windows = [event for event in events if event["name"] == WINDOW and event.get("cat") == "user_annotation"]
    if len(windows) != 1:
        raise ValueError(f"the trace has {len(windows)} ranges called {WINDOW}, not one")
    (window,) = windows
    start, end = window["ts"], window["ts"] + window["dur"]
    on_device = any(event.get("cat") == "kernel" for event in events)
    busy = device_work(events, sizes) if on_device else operators(events, thread=window["tid"])
    busy = [Busy(max(b.start, start), min(b.end, end), b.row, b.name) for b in busy if b.start < end and b.end > start]
    waits = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == DATA and e.get("cat") == "user_annotation"]
    rows, hidden = _shares(busy, start, end, waits=waits, idle=IDLE if on_device else HOST)
    per_step = 1e-6 / num_steps
    return Breakdown(
        device="device time" if on_device else "host time",
        num_steps=num_steps,
        step_s=(end - start) * per_step,
        rows={row: us * per_step for row, us in rows.items()},
        communication_hidden_s=hidden * per_step,
        kernels=_longest(busy, num_steps),
    )


def device_work(events: Iterable[dict[str, Any]], sizes: Sizes) -> list[Busy]:
    """Return every kernel and copy of a device, with the row that it belongs to.

    A kernel is known by its name and by the operators and ranges on the host in which it was launched.
    """
    on_host: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    launches: dict[Any, dict[str, Any]] = {}
    work: list[dict[str, Any]] = []
    for event in events:
        category = event.get("cat")
        if category in ("cpu_op", "user_annotation"):
            on_host[event["tid"]].append(event)
        elif category in ("cuda_runtime", "cuda_driver"):
            launches[event["args"].get("correlation")] = event
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append(event)
    enclosing = _Enclosing(on_host)
    busy: list[Busy] = []
    of_call: defaultdict[tuple[int, str], list[int]] = defaultdict(list)  # an MoE op's places in busy
    for event in sorted(work, key=lambda event: float(event["ts"])):
        launch = launches.get(event["args"].get("correlation"))
        around = [] if launch is None else enclosing.of(launch)
        row = _row(event["name"], around, sizes)
        if row == _EXPERTS_ROW:
            call = next(outer for outer in around if _EXPERTS.search(outer["name"]))
            of_call[id(call), call["name"]].append(len(busy))
        busy.append(Busy(event["ts"], event["ts"] + event["dur"], row, event["name"]))
    for (_, op), places in of_call.items():
        for place, form in zip(places, _forms(op, [busy[place].name for place in places]), strict=True):
            busy[place] = busy[place]._replace(row=f"{_EXPERTS_ROW}: {form}")
    return busy


def operators(events: Iterable[dict[str, Any]], *, thread: Any) -> list[Busy]:
    """Return the stretches of one thread's time in which an operator is the innermost one."""
    calls = [event for event in events if event.get("cat") == "cpu_op" and event["tid"] == thread]
    busy: list[Busy] = []
    open_calls: list[list[Any]] = []  # [time from which it is the innermost, its end, name]

    def close_until(time: float) -> None:
        while open_calls and open_calls[-1][1] <= time:
            since, until, name = open_calls.pop()
            busy.append(Busy(since, until, name, name))
            if open_calls:
                open_calls[-1][0] = until

    for call in sorted(calls, key=lambda event: (event["ts"], -event["dur"])):
        close_until(call["ts"])
        if open_calls:
            since, _, name = open_calls[-1]
            busy.append(Busy(since, call["ts"], name, name))
        open_calls.append([call["ts"], call["ts"] + call["dur"], call["name"]])
    close_until(float("inf"))
    return busy


def _row(name: str, around: Sequence[dict[str, Any]], sizes: Sizes) -> str:
    """Return the row of a kernel from its name and what its launch happened in, the innermost first."""
    names = [event["name"] for event in around]
    dims = {size for event in around[:2] for size in _flat(event.get("args", {}).get("Input Dims", []))}
    if "nccl" in name.lower():
        return COMMUNICATION
    if any("Optimizer.step" in outer or outer == CLIP for outer in names):
        return "optimiser and clipping"
    if any(outer.startswith(("FSDP::", "fsdp::")) for outer in names):
        return "copies for sharding"
    if any(_EXPERTS.search(outer) for outer in names):
        return _EXPERTS_ROW
    if not _FUSED.search(name) and any(_ATTENTION.search(each) for each in (name, *names)):
        return "attention"
    if any(outer.startswith("gristmill::") for outer in names):
        return "routing"
    if sizes.vocab_size in dims or any(_HEAD.search(outer) for outer in names):
        return "embedding, head and loss"
    if _PRODUCT.search(name) or any(_PRODUCT_OPS.search(outer) for outer in names[:1]):
        is_router = bool(dims & {sizes.num_experts, 2 * sizes.num_experts})
        return "router product" if is_router else "dense products"
    return "norms and elementwise"


def _flat(dims: Any) -> Iterable[int]:
    if isinstance(dims, int):
        yield dims
    elif isinstance(dims, list):
        for each in dims:
            yield from _flat(each)


def _forms(op: str, kernels: list[str]) -> list[str]:
    """Return what each kernel of one call of the MoE ``op`` computes.

    The kernels of cute_sm90 have two names for seven products; which is which follows from their order in layer_op.py.
    """
    products = {"_bwd": ["up again", "down backward"], "_up": ["dx"], "_fwd": ["up", "down"]}.get(
        op[op.rindex("_") :], []
    )
    if op.endswith("_bwd") and sum("GroupedGemm" in kernel for kernel in kernels) == 1:
        products = ["down backward"]
    gradients = ["dw_gate_up"] if op.endswith("_up") else ["dw_down"]
    forms = []
    for kernel in kernels:
        order = products if "GroupedGemm" in kernel else gradients if "WeightGrad" in kernel else []
        forms.append(order.pop(0) if order else "gather-sum" if "combine" in kernel else "other")
    return forms


class _Enclosing:
    """The operators and ranges of the host around a moment of one of its threads."""

    def __init__(self, on_host: dict[Any, list[dict[str, Any]]]) -> None:
        self._starts: dict[Any, list[float]] = {}
        self._chains: dict[Any, list[list[dict[str, Any]]]] = {}
        for thread, events in on_host.items():
            events.sort(key=lambda event: (event["ts"], -event["dur"]))
            chain: list[dict[str, Any]] = []
            chains = []
            for event in events:
                chain = [*(e for e in chain if e["ts"] + e["dur"] > event["ts"]), event]
                chains.append(chain)
            self._starts[thread] = [event["ts"] for event in events]
            self._chains[thread] = chains

    def of(self, launch: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what encloses ``launch``, the innermost first."""
        starts = self._starts.get(launch["tid"])
        if starts is None:
            return []
        index = bisect_left(starts, launch["ts"])
        while index < len(starts) and starts[index] == launch["ts"]:
            index += 1
        if index == 0:
            return []
        chain = self._chains[launch["tid"]][index - 1]
        return [event for event in reversed(chain) if event["ts"] + event["dur"] >= launch["ts"]]


def _shares(
    busy: Sequence[Busy], start: float, end: float, *, waits: Sequence[tuple[float, float]], idle: str
) -> tuple[dict[str, float], float]:
    """Return the time from ``start`` to ``end`` by row, and how long communication ran beside something else."""
    changes: list[tuple[float, str, int]] = []
    for b in busy:
        changes += [(b.start, b.row, 1), (b.end, b.row, -1)]
    for wait_start, wait_end in waits:
        changes += [(max(start, wait_start), DATA_WAIT, 1), (min(end, wait_end), DATA_WAIT, -1)]
    changes += [(start, idle, 0), (end, idle, 0)]
    changes.sort(key=lambda change: change[0])
    rows: defaultdict[str, float] = defaultdict(float)
    active: Counter[str] = Counter()
    hidden = 0.0
    for (time, row, change), (later, _, _) in pairwise(changes):
        active[row] += change
        span = min(later, end) - max(time, start)
        if span <= 0:
            continue
        computing = {r: n for r, n in active.items() if n > 0 and r not in (COMMUNICATION, DATA_WAIT)}
        if computing:
            total = sum(computing.values())
            for r, n in computing.items():
                rows[r] += span * n / total
            hidden += span * (active[COMMUNICATION] > 0)
        elif active[COMMUNICATION] > 0:
            rows[COMMUNICATION] += span
        else:
            rows[DATA_WAIT if active[DATA_WAIT] > 0 else idle] += span
    return dict(rows), hidden


def _longest(busy: Sequence[Busy], num_steps: int, limit: int = 40) -> list[dict[str, Any]]:
    time: defaultdict[tuple[str, str], float] = defaultdict(float)
    count: Counter[tuple[str, str]] = Counter()
    for b in busy:
        time[b.row, b.name] += b.end - b.start
        count[b.row, b.name] += 1
    longest = sorted(time, key=lambda key: -time[key])[:limit]
    return [
        {"row": row, "name": name, "s": time[row, name] * 1e-6 / num_steps, "count": count[row, name] / num_steps}
        for row, name in longest
    ]
