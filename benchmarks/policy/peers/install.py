"""Makes an environment for every peer; some minutes and 2 GB the first time.

python benchmarks/policy/peers/install.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ALL = ("onnxruntime==1.32.0", "orjson", "numpy<3")


def main() -> None:
    """Installs what is missing."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    for line in (Path(__file__).parent / "requirements.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, packages = line.partition(": ")
        target = folder / name
        if (target / ".done").exists():
            continue
        print(f"==> {name}: {packages}", flush=True)
        venv.create(target, with_pip=True, clear=True)
        pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages.split(), *ALL], check=True)
        (target / ".done").touch()


if __name__ == "__main__":
    main()
