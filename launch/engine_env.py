"""Makes SGLang's own Python environment, which engine.sglang_env names:

    python launch/engine_env.py [FOLDER] [--python PYTHON]

With an NVIDIA GPU it installs SGLang as PyPI has it, otherwise what SGLang's server needs on a CPU. `make sglang-env`
calls it. It needs nothing but Python itself.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

SGLANG = "sglang==0.5.23"
FOLDER = ".venv-sglang"
PIP = "pip>=25.1"
FILES = Path(__file__).resolve().with_name("sglang_env")
EXIT_USER_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    """Make the environment; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=FOLDER, metavar="FOLDER", help=f"left out: {FOLDER}")
    parser.add_argument("--python", default=sys.executable, help="the Python that it is made with; left out: this one")
    options = parser.parse_args(argv)
    folder = Path(options.folder)
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        return fail(f"{folder} is there and no Python environment: choose another folder")
    for command in commands(options.python, folder, gpu=has_gpu()):
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            return fail(f"there is no program {command[0]!r}: give another --python")
        except subprocess.CalledProcessError as error:
            return fail(f"{' '.join(map(str, command[:5]))} … ended with {error.returncode}; its reason is above")
    print(f"SGLang's environment is in {folder}: set engine.sglang_env to it unless it is {FOLDER}")
    return 0


def has_gpu() -> bool:
    """Tell whether nvidia-smi lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return bool(listed.stdout.strip())


def commands(python: str, folder: Path, *, gpu: bool) -> list[list[str]]:
    """Return the commands that make the environment, in order."""
    pip = [str(folder / "bin" / "python"), *["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]]
    made = [[python, "-m", "venv", "--clear", str(folder)], [*pip, "--upgrade", PIP]]
    if gpu:
        return [*made, [*pip, SGLANG]]
    pinned = [*pip, "--constraint", str(FILES / "constraints-cpu.txt")]
    return [
        *made,
        [*pinned, "torch"],
        [*pinned, "--requirement", str(FILES / "requirements-cpu.txt")],
        [*pinned, "--no-deps", SGLANG, "torchvision"],
    ]


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
