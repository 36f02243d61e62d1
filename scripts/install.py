"""Makes ``.venv`` and installs the project into it. Needs nothing but Python 3.11 to 3.13.

Run by ``make setup`` whenever pyproject.toml or the constraints change. Safe to run again: pip leaves alone what is
there already. With an NVIDIA GPU vLLM's CUDA build is installed, else its CPU build at the pinned versions.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"
SUPPORTED = ((3, 11), (3, 13))
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch publishes its "+cpu" builds only there
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    """Installs, and leaves a stamp only when everything is in place."""
    _check_python()
    STAMP.unlink(missing_ok=True)
    if not _has_working_pip():
        _say(f"making {VENV.relative_to(ROOT)} with Python {sys.version.split()[0]}")
        _make_venv()
    build = "gpu" if _has_nvidia_gpu() else "cpu"
    _say(f"installing the {build} build and its requirements (some minutes and 4 GB the first time)")
    if not _install(build):
        return 1
    if build == "cpu":
        _remove_broken_companions()
    STAMP.touch()
    _say("ready")
    return 0


def _check_python() -> None:
    lowest, highest = SUPPORTED
    if not lowest <= sys.version_info[:2] <= highest:
        sys.exit(
            f"Python {sys.version.split()[0]} at {sys.executable}: needs {lowest[0]}.{lowest[1]} to "
            f"{highest[0]}.{highest[1]}; name another one with `make PYTHON=python3.11 ...`"
        )


def _has_working_pip() -> bool:
    return PYTHON.exists() and _run([PYTHON, "-m", "pip", "--version"], quiet=True) == 0


def _make_venv() -> None:
    try:
        venv.create(VENV, with_pip=True, clear=VENV.exists())
    except (subprocess.CalledProcessError, ImportError):
        shutil.rmtree(VENV, ignore_errors=True)
        sys.exit("this Python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv")


def _has_nvidia_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and _run(["nvidia-smi", "-L"], quiet=True) == 0


def _install(build: str) -> bool:
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "on"]
    target = ["--editable", f"{ROOT}[{build},train,policy,loadtest,dev]"]
    if build == "gpu":
        return _run([*pip, *target]) == 0
    target += ["--constraint", ROOT / "constraints" / "cpu.txt"]
    if _run([*pip, *target]) == 0:
        return True
    _say("pip's own index has no CPU build of torch; trying again with PyTorch's")
    return _run([*pip, "--extra-index-url", TORCH_CPU_INDEX, *target]) == 0


def _remove_broken_companions() -> None:
    """Builds of torchvision made for CUDA fail to import beside a CPU torch and take transformers down with them."""
    for name in TORCH_COMPANIONS:
        if _run([PYTHON, "-c", f"import importlib.util as u; exit(u.find_spec({name!r}) is None)"], quiet=True):
            continue
        if _run([PYTHON, "-c", f"import {name}"], quiet=True):
            _say(f"removing {name}, which does not work beside this torch (serving text does not need it)")
            _run([PYTHON, "-m", "pip", "uninstall", "--yes", "--quiet", name])


def _run(command: list[str | Path], *, quiet: bool = False) -> int:
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run([str(part) for part in command], check=False, stdout=sink, stderr=sink, cwd=ROOT).returncode


def _say(message: str) -> None:
    print(f"==> {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
