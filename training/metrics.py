"""The names and the arithmetic of every metric that is not about experts (those are in load.py). No I/O.

| key | what it counts |
|---|---|
| progress/{step,tokens,epoch} | since the start of the run, over all processes |
| progress/resumed | 1 where a process went on with the run; metrics.jsonl only |
| loss/ce | nats per valid token of the step logged |
| loss/load_balance, loss/router_z | unweighted; 1 = balanced |
| loss/total | the weighted sum that is minimised |
| optim/grad_norm, optim/lr | the norm before clipping |
| throughput/tokens_per_day | tokens / (step time with data wait) over the steps since the last line x 86,400 (1) |
| throughput/tokens_per_day_wall | tokens / everything since the process began to build the run x 86,400 |
| throughput/tokens_per_s_per_gpu | the first, per second and device |
| time/{step,data,forward,backward,optimizer,log}_s | mean over those steps; the parts sum to the step (3) |
| time/{eval,save}_s | spent since the last line |
| memory/peak_gib | most device memory allocated since the last line; absent on the CPU (5) |
| compile/graphs | graphs that torch.compile made since the process began (4) |
| compile/kernels | kernels of the MoE backend compiled since then; absent where it has none (4) |
| moe/{load_max_over_mean,router_entropy,z,logit_max}_{min,median,max} | over layers, all micro-batches (2) |
| moe/dead_experts_max | experts that no token chose, in the worst layer (2) |
| moe/pairs_{added,dropped}_fraction | what rounding did, per top-K pair |
| moe/tokens_without_expert_fraction | per token and layer |
| moe/tile_waste_fraction | unused rows of the tiles that hold any |
| eval/held_out/ce_{top_k,train_routing} | held-out nats per token under either routing |
| eval/held_out/routing_gap | the training routing's minus top-K's |

(1) Without evaluation, saves, what profile=true writes, and the first line after a start.
(2) From top-K counts, before rounding.
(3) On CUDA by the device's clock: data is what it waited for a batch, log what it waited for a line. With
    parallel.cuda_graph the forward's time is in backward.
(4) They rise in the first step and in the first evaluation, and then no more.
(5) In the line after parallel.cuda_graph has made its graph: since then.
"""

import time
from collections.abc import Callable
from typing import Any

from training.clock import Clock, HostClock

SECONDS_PER_DAY = 86_400
STEP_PARTS = ("data", "forward", "backward", "optimizer", "log")


class Stopwatch:
    """Splits the time of a process into the parts of its steps, evaluation and saves.

    Each ``lap`` gives the time since the previous lap to one part, so that nothing is counted twice or lost.
    ``now`` returns the host's seconds and only moves forward; ``clock`` times the parts, by default on the host.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, clock: Clock | None = None) -> None:
        self._now = now
        self._clock: Clock = clock or HostClock(now)
        self._start = now()
        self._last = self._clock.mark()
        self._laps: list[tuple[str, Any]] = []
        self._is_first_window = True
        self._tokens = 0
        self._all_tokens = 0
        self._steps = 0

    def lap(self, part: str) -> None:
        """Give the time since the last lap to ``part``."""
        self._laps.append((part, self._clock.mark()))

    def count_step(self, tokens: int) -> None:
        """Note that a step over ``tokens`` tokens has ended."""
        self._steps += 1
        self._tokens += tokens
        self._all_tokens += tokens

    def window(self, *, num_devices: int) -> dict[str, float]:
        """Return the time and throughput metrics since the last call, and start a new window."""
        seconds = self._seconds()
        step_s = sum(seconds.get(part, 0.0) for part in STEP_PARTS)
        metrics = {
            "throughput/tokens_per_day_wall": self._all_tokens / (self._now() - self._start) * SECONDS_PER_DAY,
            "time/step_s": step_s / max(1, self._steps),
        }
        for part in STEP_PARTS:
            metrics[f"time/{part}_s"] = seconds.get(part, 0.0) / max(1, self._steps)
        for part in ("eval", "save"):
            metrics[f"time/{part}_s"] = seconds.get(part, 0.0)
        if not self._is_first_window and self._steps > 0:
            tokens_per_s = self._tokens / step_s
            metrics["throughput/tokens_per_day"] = tokens_per_s * SECONDS_PER_DAY
            metrics["throughput/tokens_per_s_per_gpu"] = tokens_per_s / num_devices
        self._is_first_window = False
        self._tokens = self._steps = 0
        return metrics

    def _seconds(self) -> dict[str, float]:
        """Return the time of each part since the last call."""
        seconds: dict[str, float] = {}
        for part, mark in self._laps:
            seconds[part] = seconds.get(part, 0.0) + self._clock.seconds(self._last, mark)
            self._last = mark
        self._laps = []
        return seconds
