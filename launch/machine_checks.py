"""Checks of a machine that need no GPU work: versions, nvidia-smi's answers, the environment, memory, disks, networks.

Each function returns its findings; what may hang is asked of another process (probes.py).
"""

import csv
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.probes import Finding, ProgramError, Status, ask, run_program

_GIB = 2**30
_PYTHON = ((3, 11), (3, 13))  # from the first on, below the second
_SMI_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "clocks.max.sm",
    "power.limit",
    "power.default_limit",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
)
_IDLE_MEMORY_MIB = 1024  # more in use than this means that somebody else is at work
_HOT_CELSIUS = 85
_SLOW_DISK = 0.1e9  # bytes/s
_HUB, _WANDB = "https://huggingface.co", "https://api.wandb.ai"


def check_python() -> list[Finding]:
    """Say whether this Python is one that the project is tested with."""
    (least, above), here = _PYTHON, sys.version_info[:2]
    text = ".".join(map(str, sys.version_info[:3]))
    if least <= here < above:
        return [Finding(status=Status.ok, name="python", text=text)]
    status = Status.fail if here < least else Status.warn
    return [Finding(status=status, name="python", text=text, advice="3.11 and 3.12 are what is tested")]


def check_software(software: Mapping[str, Any]) -> list[Finding]:
    """Judge the versions of torch and of the packages that the kernels need, and the GPUs that torch sees."""
    gpus = software["gpus"]
    findings = [_torch(software)]
    packages = software["packages"]
    for module, extra in (("triton", "cute"), ("cutlass", "cute"), ("tvm_ffi", "cute")):
        found = packages[module]
        if found is not None:
            findings.append(Finding(status=Status.ok, name=module, text=found))
        elif not gpus:
            findings.append(Finding(status=Status.ok, name=module, text="not installed, and only GPUs need it"))
        else:
            status = Status.fail if module == "triton" else Status.warn  # the router's kernels have no other form
            what = "routing on GPUs needs it" if module == "triton" else "without it the experts run on portable"
            advice = f"{what}: pip install 'gristmill[{extra}]'"
            findings.append(Finding(status=status, name=module, text="not installed", advice=advice))
    for index, gpu in enumerate(gpus):
        text = f"{gpu['name']}, {gpu['arch']}, {gpu['memory'] / _GIB:.0f} GiB"
        is_hopper = gpu["arch"] == "sm90"
        advice = "" if is_hopper else "the fast kernels are for sm90; the experts run on portable"
        status = Status.ok if is_hopper else Status.warn
        findings.append(Finding(status=status, name=f"gpu {index}", text=text, advice=advice))
    if len({gpu["name"] for gpu in gpus}) > 1:
        findings.append(
            Finding(
                status=Status.warn,
                name="gpus",
                text="they differ",
                advice="the slowest sets the pace: choose equal ones with CUDA_VISIBLE_DEVICES",
            )
        )
    return findings


def _torch(software: Mapping[str, Any]) -> Finding:
    text = f"{software['torch']}, CUDA {software['cuda'] or 'none'}, NCCL {software['nccl'] or 'none'}"
    major, minor = (int(word) for word in software["torch"].split(".")[:2])
    if not (2, 11) <= (major, minor) < (2, 14):
        return Finding(status=Status.warn, name="torch", text=text, advice="2.11 to 2.13 are what is tested")
    if software["gpus"]:
        return Finding(status=Status.ok, name="torch", text=text)
    advice = "torch sees no GPU: a run would use the CPU" if software["cuda"] else "this build of torch has no CUDA"
    return Finding(status=Status.warn, name="torch", text=text, advice=advice)


def check_nvidia_smi(run: Callable[..., str] = run_program) -> list[Finding]:
    """Judge what nvidia-smi says of each GPU: power limit, ECC errors, temperature, memory in use, MIG."""
    if shutil.which("nvidia-smi") is None and run is run_program:
        text = "not here: no power limits, clocks or ECC errors are known"
        return [Finding(status=Status.warn, name="nvidia-smi", text=text, advice="install the driver on a GPU machine")]
    try:
        output = run(
            ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"], timeout_s=30
        )
    except ProgramError as problem:
        advice = "the driver does not answer: see dmesg, and restart the machine if it stays so"
        return [Finding(status=Status.fail, name="nvidia-smi", text=str(problem), advice=advice)]
    findings: list[Finding] = []
    for row in csv.reader(output.strip().splitlines(), skipinitialspace=True):
        if len(row) != len(_SMI_FIELDS):
            text = f"a line of {len(row)} fields came for {len(_SMI_FIELDS)}: {','.join(row)[:80]}"
            findings.append(
                Finding(status=Status.warn, name="nvidia-smi", text=text, advice="read nvidia-smi yourself")
            )
            continue
        findings += _judge_gpu(dict(zip(_SMI_FIELDS, row, strict=True)))
    return findings


def _judge_gpu(values: Mapping[str, str]) -> list[Finding]:
    def number(field: str) -> float | None:
        try:
            return float(values[field])
        except ValueError:  # "[N/A]" and its like
            return None

    limit, default = number("power.limit"), number("power.default_limit")
    errors, used, heat = (
        number("ecc.errors.uncorrected.volatile.total"),
        number("memory.used"),
        number("temperature.gpu"),
    )
    faults: list[tuple[Status, str, str]] = []
    if errors:
        faults.append((Status.fail, f"{errors:.0f} uncorrected ECC errors", "reset the GPU; replace it if they return"))
    if limit is not None and default is not None and limit < default:
        advice = f"nvidia-smi -pl {default:.0f} as root gives it back"
        faults.append((Status.warn, f"power is limited to {limit:.0f} of {default:.0f} W", advice))
    if used is not None and used > _IDLE_MEMORY_MIB:
        faults.append((Status.warn, f"{used / 1024:.1f} GiB in use", "another process is at work on it"))
    if heat is not None and heat >= _HOT_CELSIUS:
        faults.append((Status.warn, f"{heat:.0f} degrees", "it will lower its clocks: see to its cooling"))
    if values["mig.mode.current"] == "Enabled":
        faults.append((Status.warn, "MIG is enabled", "a run sees a slice of the GPU"))
    name = f"nvidia-smi {values['index']}"
    if not faults:
        text = f"driver {values['driver_version']}, {values['power.limit']} W, up to {values['clocks.max.sm']} MHz"
        return [Finding(status=Status.ok, name=name, text=text)]
    return [Finding(status=status, name=name, text=text, advice=advice) for status, text, advice in faults]


_HARMFUL: dict[str, tuple[Callable[[str], bool], str]] = {
    "NCCL_NVLS_ENABLE": (
        lambda value: True,
        "NVLink multicast: 1 fails where the machine does not allow it, 0 is slower where it does; unset it, NCCL asks",
    ),
    "NCCL_P2P_DISABLE": (lambda value: value == "1", "GPUs talk through host memory: unset it"),
    "NCCL_SHM_DISABLE": (lambda value: value == "1", "processes of a host talk through the network: unset it"),
    "NCCL_IB_DISABLE": (lambda value: value == "1", "hosts talk over TCP: unset it where there is InfiniBand"),
    "NCCL_ALGO": (lambda value: True, "one algorithm for all sizes: unset it"),
    "NCCL_PROTO": (lambda value: True, "one protocol for all sizes: unset it"),
    "TORCH_DISTRIBUTED_DEBUG": (lambda value: value == "DETAIL", "every collective is checked: unset it"),
    "CUDA_LAUNCH_BLOCKING": (lambda value: value == "1", "the host waits for every kernel: unset it"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (lambda value: value == "1", "every tensor asks the driver: unset it"),
    "TORCHDYNAMO_DISABLE": (lambda value: value == "1", "blocks are not compiled: unset it"),
    "TORCH_COMPILE_DISABLE": (lambda value: value == "1", "blocks are not compiled: unset it"),
    "TRITON_INTERPRET": (lambda value: value == "1", "Triton kernels run in Python: unset it"),
    "OMP_WAIT_POLICY": (
        lambda value: value.lower() == "active",
        "idle threads keep their cores busy: unset it, train.py sets passive",
    ),
    "CUDA_VISIBLE_DEVICES": (lambda value: value.strip() in ("", "-1"), "it hides every GPU: unset it"),
}


def check_environment(variables: Mapping[str, str], *, num_gpus: int, num_cores: int) -> list[Finding]:
    """Judge the environment variables that are known to slow a run down or to break it."""
    findings = [
        Finding(status=Status.warn, name="environment", text=f"{name}={variables[name]}", advice=advice)
        for name, (is_harmful, advice) in _HARMFUL.items()
        if name in variables and is_harmful(variables[name])
    ]
    threads = variables.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) * max(1, num_gpus) > num_cores:
        findings.append(
            Finding(
                status=Status.warn,
                name="environment",
                text=f"OMP_NUM_THREADS={threads} in {max(1, num_gpus)} processes on {num_cores} cores",
                advice="more threads than cores: unset it, the run sets its own (train.num_threads)",
            )
        )
    return findings or [Finding(status=Status.ok, name="environment", text="no variable that is known to harm")]


def check_shared_memory(folder: Path, *, num_gpus: int) -> list[Finding]:
    """Judge the size of /dev/shm, through which NCCL and gloo pass data between processes of a host."""
    if not folder.is_dir():
        return [
            Finding(status=Status.warn, name=str(folder), text="not here", advice="processes may not find each other")
        ]
    total = shutil.disk_usage(folder).total
    text = f"{total / _GIB:.2f} GiB"
    if total < _GIB and num_gpus > 1:
        advice = "NCCL may run out of it: start the container with --shm-size=8g"
        return [Finding(status=Status.warn, name=str(folder), text=text, advice=advice)]
    return [Finding(status=Status.ok, name=str(folder), text=text)]


def check_disk(root: Path, *, needed_gib: float, write_bytes: int) -> list[Finding]:
    """Judge the space in the folder that runs are written to, and how fast it takes a checkpoint."""
    name = "run.root"
    try:
        answer = ask("disk", str(root.absolute()), str(write_bytes), timeout_s=120)
    except ProgramError as problem:
        return [Finding(status=Status.fail, name=name, text=f"{root}: {problem}", advice="see to this disk first")]
    there, free, rate = answer["folder"], answer["free"], answer["rate"]
    if not answer["writable"]:
        text = f"{there} cannot be written"
        return [Finding(status=Status.fail, name=name, text=text, advice="choose another run.root")]
    if rate is None or free < needed_gib * _GIB:
        asked_gib = max(needed_gib, write_bytes / _GIB)  # the trial write too needs its space
        advice = f"{asked_gib:g} GiB are asked for; launch.preflight says what a run writes"
        return [Finding(status=Status.fail, name=name, text=f"{free / _GIB:.1f} GiB free in {there}", advice=advice)]
    text = f"{free / _GIB:.0f} GiB free in {there}, writes {rate / 1e9:.2f} GB/s"
    if rate < _SLOW_DISK:
        advice = "a checkpoint of 100 GB would take a quarter of an hour or more"
        return [Finding(status=Status.warn, name=name, text=text, advice=advice)]
    return [Finding(status=Status.ok, name=name, text=text)]


def check_data(root: Path) -> list[Finding]:
    """Say whether the prepared data in ``root`` is whole, as ``python -m data.inspect`` does."""
    try:
        output = run_program([sys.executable, "-m", "data.inspect", str(root.resolve())], timeout_s=120)
    except ProgramError as problem:
        return [Finding(status=Status.fail, name="data", text=str(problem), advice="prepare it with data.prepare")]
    rows = [line for line in output.splitlines() if line.startswith("rows of ")]
    return [Finding(status=Status.ok, name="data", text=f"{root}: {rows[-1] if rows else 'read'}")]


def check_network() -> list[Finding]:
    """Say whether the Hugging Face Hub and Weights & Biases can be reached."""
    findings = []
    for name, url, offline in (
        ("hugging face", _HUB, "models and data have to be here already"),
        ("wandb", _WANDB, "set logging=offline and upload later with wandb sync"),
    ):
        try:
            status = ask("reach", url, timeout_s=30)["status"]
        except ProgramError as problem:
            findings.append(Finding(status=Status.warn, name=name, text=f"{url}: {problem}", advice=offline))
        else:
            findings.append(Finding(status=Status.ok, name=name, text=f"{url} answers ({status})"))
    return findings
