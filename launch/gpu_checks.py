"""Checks that make GPUs, or the CPU in their place, work: rates, the experts' kernels, sums over processes."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from launch.probes import Finding, ProgramError, Status, ask, ask_all, run_program

_SLOW, _BROKEN = 0.95, 0.8  # of the median GPU's rate
_ALLOWED_ERROR = 0.02  # bf16 has 8 bits: rounding inputs, h and outputs gives about 0.004
_SLOWEST_NVLINK = 50e9  # bytes/s; PCIe gives less, NVLink of any kind since sm80 more


def check_rates(num_gpus: int) -> list[Finding]:
    """Compare the GPUs with each other at a bf16 matrix product and at a copy, all at work at once."""
    answers = ask_all([("rates", f"cuda:{index}") for index in range(num_gpus)], timeout_s=180)
    return judge_rates(answers)


def judge_rates(answers: Sequence[dict[str, Any] | ProgramError]) -> list[Finding]:
    """Judge the rates of GPUs beside the median of them."""
    rates = [answer for answer in answers if not isinstance(answer, ProgramError)]
    middle = {key: median(rate[key] for rate in rates) for key in ("matmul", "copy")} if rates else {}
    findings = []
    for index, answer in enumerate(answers):
        name = f"rates of gpu {index}"
        if isinstance(answer, ProgramError):
            advice = "leave it out with CUDA_VISIBLE_DEVICES, and see dmesg"
            findings.append(Finding(status=Status.fail, name=name, text=str(answer), advice=advice))
            continue
        text = f"bf16 product {answer['matmul'] / 1e12:.0f} TFLOP/s, copy {answer['copy'] / 1e12:.2f} TB/s"
        share = min(answer[key] / middle[key] for key in middle)
        if share >= _SLOW:
            findings.append(Finding(status=Status.ok, name=name, text=text))
            continue
        status = Status.fail if share < _BROKEN else Status.warn
        advice = "every step waits for it: see its clocks, power and temperature, or leave it out"
        findings.append(Finding(status=status, name=name, text=f"{text}, {share:.0%} of the median", advice=advice))
    return findings


def check_experts(device: str) -> list[Finding]:
    """Run a small layer on the backend that a run would take, and compare it with the reference."""
    try:
        answer = ask("experts", device, timeout_s=300)
    except ProgramError as problem:
        advice = "a run with kernels.backend=portable may still work"
        return [Finding(status=Status.fail, name="experts", text=f"on {device}: {problem}", advice=advice)]
    return judge_experts(answer, device)


def judge_experts(answer: dict[str, Any], device: str) -> list[Finding]:
    """Judge the experts' error and backend, and whether compiled kernels can be kept."""
    text = (
        f"{answer['backend']} on {device}: relative error {answer['error']:.1e}, first call {answer['seconds']:.1f} s"
    )
    status, advice = Status.ok, ""
    if not answer["error"] < _ALLOWED_ERROR:
        status = Status.fail
        advice = "these kernels are wrong on this machine: train with another kernels.backend, and report it"
    elif answer["why_not_cute"] is not None and device != "cpu":
        status, advice = Status.warn, f"the fast kernels cannot run: {answer['why_not_cute']}"
    findings = [Finding(status=status, name="experts", text=text, advice=advice)]
    if answer["keeps_kernels"]:
        return [*findings, Finding(status=Status.ok, name="kernel cache", text=answer["cache"])]
    text = f"{answer['cache']} cannot be written"
    advice = "every process compiles its kernels anew: set XDG_CACHE_HOME to a folder that can be"
    return [*findings, Finding(status=Status.warn, name="kernel cache", text=text, advice=advice)]


def check_links(gpus: Sequence[dict[str, Any]], run: Callable[..., str] = run_program) -> list[Finding]:
    """Say whether every GPU reaches every other's memory, and how many NVLinks of each are up."""
    if len(gpus) < 2:
        return []
    findings = []
    cut_off = [index for index, gpu in enumerate(gpus) if len(gpu["peers"]) < len(gpus) - 1]
    if cut_off:
        text = f"gpu {', '.join(map(str, cut_off))} cannot reach the memory of every other"
        advice = "sums go through host memory: see nvidia-smi topo -m, and the container's settings"
        findings.append(Finding(status=Status.warn, name="peer access", text=text, advice=advice))
    else:
        findings.append(Finding(status=Status.ok, name="peer access", text=f"between all {len(gpus)} GPUs"))
    if shutil.which("nvidia-smi") is None and run is run_program:
        return findings
    try:
        output = run(["nvidia-smi", "nvlink", "--status"], timeout_s=30)
    except ProgramError as problem:
        return [*findings, Finding(status=Status.warn, name="nvlink", text=str(problem))]
    blocks = ["GPU " + block for block in output.split("GPU ")[1:]]
    up = [block.count("GB/s") for block in blocks]
    if not up or min(up) < max(up) or max(up) == 0:
        advice = "see nvidia-smi nvlink --status and the fabric manager"
        text = f"links that are up, by GPU: {up or 'none'}"
        return [*findings, Finding(status=Status.warn, name="nvlink", text=text, advice=advice)]
    return [*findings, Finding(status=Status.ok, name="nvlink", text=f"{up[0]} links up on each GPU")]


def check_group(num_gpus: int) -> list[Finding]:
    """Sum over one process a GPU with NCCL; without several GPUs over two processes with gloo."""
    size = num_gpus if num_gpus > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        probes = [("group", str(rank), str(size), folder) for rank in range(size)]
        return judge_group(ask_all(probes, timeout_s=120), is_nccl=num_gpus > 1)


def judge_group(answers: Sequence[dict[str, Any] | ProgramError], *, is_nccl: bool) -> list[Finding]:
    """Judge the answers of processes that summed together."""
    name = "nccl" if is_nccl else "gloo"
    for rank, answer in enumerate(answers):
        if isinstance(answer, ProgramError):
            advice = (
                "look closer with NCCL_DEBUG=INFO, and see nvidia-smi topo -m"
                if is_nccl
                else "see whether a firewall or the name of this host keeps its processes apart"
            )
            text = f"process {rank} of {len(answers)}: {answer}"
            return [Finding(status=Status.fail, name=name, text=text, advice=advice)]
        if not answer["right"]:
            text = f"process {rank} of {len(answers)} got a wrong sum"
            advice = "do not train here: a link or a GPU is damaged, or NCCL and the driver do not fit"
            return [Finding(status=Status.fail, name=name, text=text, advice=advice)]
    rates = [answer["bandwidth"] for answer in answers if not isinstance(answer, ProgramError)]
    text = f"sums of {len(answers)} processes are right, {min(rates) / 1e9:.1f} GB/s on the bus"
    if is_nccl and min(rates) < _SLOWEST_NVLINK:
        advice = "that is less than NVLink gives: see nvidia-smi topo -m; sharded training will wait for it"
        return [Finding(status=Status.warn, name=name, text=text, advice=advice)]
    return [Finding(status=Status.ok, name=name, text=text)]
