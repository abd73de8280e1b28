import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import probe
from launch.doctor import main
from launch.gpu_checks import check_group, check_links, judge_experts, judge_group, judge_rates
from launch.machine_checks import (
    check_data,
    check_disk,
    check_environment,
    check_nvidia_smi,
    check_shared_memory,
    check_software,
)
from launch.probes import Finding, ProgramError, Status, run_program, run_programs

OK, WARN, FAIL = Status.ok, Status.warn, Status.fail
# Written after nvidia-smi's format, not recorded from a machine.
HEALTHY = "0, NVIDIA H200, 580.65.06, 143771, 4, 1980, 700.00, 700.00, 31, 0, Disabled"


def answering(output: str) -> Callable[..., str]:
    """A program that prints ``output`` whatever it is asked."""
    return lambda command, *, timeout_s: output


def statuses(findings: list[Finding]) -> list[Status]:
    return [finding.status for finding in findings]


def text_of(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings))


# -- the report


def look_that_finds(*found: Status) -> Callable[..., Any]:
    return lambda options: (Finding(status=status, name="check", text="text", advice="advice") for status in found)


@pytest.mark.parametrize(("found", "code"), [((OK, WARN), 0), ((OK, FAIL, OK), 1), ((), 0)])
def test_only_a_failure_leaves_with_1(found: tuple[Status, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], look=look_that_finds(*found)) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [status.value for status in found]
    assert lines[-1].endswith(f"{found.count(FAIL)} failed")


# -- programs


def test_a_program_that_does_not_end_is_killed_in_time() -> None:
    start = time.monotonic()
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    quick = [sys.executable, "-c", "print('done')"]
    hung, done = run_programs([slow, quick], timeout_s=1.5)
    assert time.monotonic() - start < 30
    assert isinstance(hung, ProgramError)
    assert "no answer within 1.5 s" in str(hung)
    assert done == "done\n"


def test_a_program_that_fails_or_is_not_there_is_told_with_its_last_words() -> None:
    with pytest.raises(ProgramError, match=r"exit code 3: it broke"):
        run_program([sys.executable, "-c", "import sys; print('it broke', file=sys.stderr); sys.exit(3)"], timeout_s=30)
    with pytest.raises(ProgramError, match="could not be started"):
        run_program(["no-such-program-anywhere"], timeout_s=1)


# -- nvidia-smi


def test_a_healthy_gpu_is_ok() -> None:
    findings = check_nvidia_smi(answering(HEALTHY + "\n" + HEALTHY.replace("0, NV", "1, NV", 1)))
    assert statuses(findings) == [OK, OK]
    assert "driver 580.65.06, 700.00 W, up to 1980 MHz" in text_of(findings)


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (HEALTHY.replace("31, 0,", "31, 2,"), FAIL, "2 uncorrected ECC errors"),
        (HEALTHY.replace("700.00, 700", "450.00, 700"), WARN, "450 of 700 W"),
        (HEALTHY.replace("143771, 4,", "143771, 40960,"), WARN, "40.0 GiB in use"),
        (HEALTHY.replace("31, 0", "91, 0"), WARN, "91 degrees"),
        (HEALTHY.replace("Disabled", "Enabled"), WARN, "MIG"),
        ("Unable to determine the device handle", WARN, "1 fields came"),
    ],
)
def test_an_unhealthy_gpu_is_named_with_what_to_do(line: str, status: Status, words: str) -> None:
    (finding,) = check_nvidia_smi(answering(line))
    assert finding.status is status
    assert words in finding.text
    assert finding.advice


def test_what_a_gpu_does_not_tell_is_no_fault() -> None:
    line = HEALTHY.replace("700.00, 700.00, 31, 0, Disabled", "[N/A], [N/A], 31, [N/A], [N/A]")
    assert statuses(check_nvidia_smi(answering(line))) == [OK]


def test_a_driver_that_does_not_answer_is_a_failure() -> None:
    def hang(command: list[str], *, timeout_s: float) -> str:
        raise ProgramError("no answer within 30 s")

    assert statuses(check_nvidia_smi(hang)) == [FAIL]


# -- software, environment, memory, disk


def software(*gpus: dict[str, Any], **packages: str | None) -> dict[str, Any]:
    installed = {"triton": "3.6", "cutlass": "4.8.1", "tvm_ffi": "0.1.10", "wandb": None} | packages
    return {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "gpus": list(gpus), "packages": installed}


def gpu(name: str = "NVIDIA H200", arch: str = "sm90", peers: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"name": name, "arch": arch, "memory": 139 * 2**30, "peers": list(peers)}


def test_what_the_kernels_need_is_asked_for_only_where_there_is_a_gpu() -> None:
    assert set(statuses(check_software(software(gpu())))) == {OK}
    findings = check_software(software(gpu(), triton=None, cutlass=None))
    assert [f.status for f in findings if f.name in ("triton", "cutlass")] == [FAIL, WARN]
    findings = check_software(software(triton=None, cutlass=None))
    assert [f.status for f in findings if f.name in ("torch", "triton", "cutlass")] == [WARN, OK, OK]


def test_gpus_of_another_kind_or_of_two_kinds_are_told() -> None:
    findings = check_software(software(gpu(), gpu("NVIDIA A100", "sm80")))
    assert [f.status for f in findings if f.name.startswith("gpu")] == [OK, WARN, WARN]
    assert "they differ" in text_of(findings)


@pytest.mark.parametrize(
    ("name", "harmful", "harmless"),
    [
        ("NCCL_NVLS_ENABLE", "1", None),
        ("NCCL_P2P_DISABLE", "1", "0"),
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("TRITON_INTERPRET", "1", "0"),
        ("OMP_WAIT_POLICY", "ACTIVE", "passive"),
        ("OMP_NUM_THREADS", "16", "8"),
        ("CUDA_VISIBLE_DEVICES", "", "0,1"),
    ],
)
def test_a_variable_that_harms_is_named(name: str, harmful: str, harmless: str | None) -> None:
    (finding,) = check_environment({name: harmful, "PATH": "/bin"}, num_gpus=2, num_cores=16)
    assert finding.status is WARN
    assert f"{name}={harmful}" in finding.text
    without = {} if harmless is None else {name: harmless}
    assert statuses(check_environment(without, num_gpus=2, num_cores=16)) == [OK]


def test_shared_memory_matters_to_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"total": 64 * 2**20})())
    assert statuses(check_shared_memory(tmp_path, num_gpus=8)) == [WARN]
    assert statuses(check_shared_memory(tmp_path, num_gpus=1)) == [OK]
    assert statuses(check_shared_memory(tmp_path / "absent", num_gpus=1)) == [WARN]


def test_a_disk_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    answer = probe.disk(str(tmp_path / "runs" / "not" / "there"), str(8 * 2**20))
    assert answer["folder"] == str(tmp_path)
    assert answer["rate"] > 0
    assert not list(tmp_path.iterdir())
    assert probe.disk(str(tmp_path), str(answer["free"] * 2))["rate"] is None
    (tmp_path / "file").touch()
    assert not probe.disk(str(tmp_path / "file" / "runs"), "1")["writable"], "a file is in the way"


def test_a_trial_write_larger_than_the_space_is_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"free": 2**40, "writable": True, "rate": None, "folder": "/runs"}
    monkeypatch.setattr("launch.machine_checks.ask", lambda *_, timeout_s: answer)
    (finding,) = check_disk(Path("runs"), needed_gib=10, write_bytes=2**41)
    assert finding.status is FAIL
    assert "2048 GiB are asked for" in finding.advice


@pytest.mark.parametrize("arguments", [["--needs-gib", "nan"], ["--needs-gib", "-1"], ["--write-mib", "0"]])
def test_amounts_that_are_none_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments, look=lambda _: iter(()))
    assert left.value.code == 2
    assert " ".join(arguments[:1]) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"free": 2**40, "writable": True, "rate": 2e9}, OK, "1024 GiB free"),
        ({"free": 2**40, "writable": True, "rate": 1e7}, WARN, "0.01 GB/s"),
        ({"free": 2**30, "writable": True, "rate": 2e9}, FAIL, "1.0 GiB free"),
        ({"free": 2**40, "writable": False, "rate": None}, FAIL, "cannot be written"),
    ],
)
def test_a_disk_is_judged_by_space_and_speed(
    answer: dict[str, Any], status: Status, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.machine_checks.ask", lambda *_, timeout_s: answer | {"folder": "/runs"})
    (finding,) = check_disk(Path("runs"), needed_gib=10, write_bytes=2**20)
    assert finding.status is status
    assert words in finding.text


def test_a_folder_without_prepared_data_is_a_failure(tmp_path: Path) -> None:
    (finding,) = check_data(tmp_path)
    assert finding.status is FAIL
    assert str(tmp_path) in finding.text


# -- work


def test_a_slow_card_stands_out() -> None:
    good = {"matmul": 7.8e14, "copy": 4.2e12}
    slower, broken = good | {"matmul": 7.1e14}, good | {"copy": 1e12}
    findings = judge_rates([good, slower, good, good, broken, good, ProgramError("no answer within 180 s")])
    assert statuses(findings) == [OK, WARN, OK, OK, FAIL, OK, FAIL]
    assert "91% of the median" in findings[1].text


def test_the_experts_of_this_machine_are_right() -> None:
    answer = probe.experts("cpu")
    assert answer["backend"] == "portable"
    assert 0 < answer["error"] < 0.01
    assert judge_experts(answer, "cpu")[0].status is OK


def test_wrong_experts_are_a_failure_and_slow_ones_a_warning() -> None:
    answer = {"backend": "cute_sm90", "why_not_cute": None, "error": 1.0, "seconds": 9.0, "cache": "/c"}
    assert statuses(judge_experts(answer | {"keeps_kernels": True}, "cuda:0")) == [FAIL, OK]
    assert statuses(judge_experts(answer | {"error": float("nan"), "keeps_kernels": False}, "cuda:0")) == [FAIL, WARN]
    slow = answer | {"error": 0.003, "backend": "portable", "why_not_cute": "triton is not installed"}
    assert statuses(judge_experts(slow | {"keeps_kernels": True}, "cuda:0")) == [WARN, OK]


def test_two_processes_sum_over_gloo() -> None:
    (finding,) = check_group(0)
    assert finding.status is OK
    assert "sums of 2 processes are right" in finding.text


def test_a_group_is_judged_by_its_worst_process() -> None:
    good = {"over": "nccl", "right": True, "bandwidth": 3e11}
    assert statuses(judge_group([good, good], is_nccl=True)) == [OK]
    assert statuses(judge_group([good, good | {"bandwidth": 1e10}], is_nccl=True)) == [WARN]
    assert statuses(judge_group([good, good | {"right": False}], is_nccl=True)) == [FAIL]
    (finding,) = judge_group([good, ProgramError("no answer within 120 s")], is_nccl=True)
    assert finding.status is FAIL
    assert "process 1 of 2: no answer" in finding.text


def test_links_that_are_down_are_told() -> None:
    def status(*links: int) -> str:
        return "".join(
            f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\n" + "\t Link 0: 26.562 GB/s\n" * num for i, num in enumerate(links)
        )

    connected = [gpu(peers=(1,)), gpu(peers=(0,))]
    assert statuses(check_links(connected, answering(status(18, 18)))) == [OK, OK]
    assert statuses(check_links(connected, answering(status(18, 17)))) == [OK, WARN]
    assert statuses(check_links([gpu(peers=(1,)), gpu()], answering(status(18, 18)))) == [WARN, OK]
    assert check_links([gpu()]) == []
