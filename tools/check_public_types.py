"""Checks that the type of every public symbol of both packages is known in full.

Usage: python tools/check_public_types.py

The type checker only reports wrong types of annotated names, so a parameter without an annotation
passes it. This program asks it how complete the types are that a user's checker sees, for
everything public and all that it refers to. Types that jax or optax leave unknown do not count if
they are used by name (jax.Array), but do if they are spelled out here (jax.typing.ArrayLike).
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sparse_collectives", "optax_ext")
BIN = Path(sys.executable).parent


def report(package: str) -> dict[str, Any]:
    """The report of pyright on the symbols of a package."""
    # In this mode pyright uses the packages of the first `python` on the PATH, regardless of
    # --pythonpath, and does not treat the contents of the current folder as packages.
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = [BIN / "pyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    try:
        return json.loads(done.stdout)["typeCompleteness"]
    except (ValueError, KeyError):
        sys.exit(f"pyright --verifytypes {package} failed:\n{done.stdout}{done.stderr}")


def incomplete(symbols: list[dict[str, Any]]) -> list[str]:
    """One line for each reason why a symbol's type is not known in full."""
    unknown = [s for s in symbols if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    entries = [
        (s["name"], x) for s in unknown for x in s["diagnostics"] if x["severity"] == "error"
    ]
    reasons = []
    for name, entry in entries:
        where = ""
        if "range" in entry:
            line = entry["range"]["start"]["line"] + 1
            where = f"{entry['file']}:{line}: ".removeprefix(f"{ROOT}/")
        reasons.append(f"{where}{name}: {' '.join(entry['message'].split())}")
    # Symbols without a reason of their own only refer to others.
    return reasons or [symbol["name"] for symbol in unknown]


def unseen(package: str, symbols: list[dict[str, Any]]) -> list[str]:
    """Public names that pyright has not seen, because it found another package, or none."""
    module = importlib.import_module(package)
    names = [x for x in module.__all__ if not isinstance(getattr(module, x), ModuleType)]
    wanted = {f"{package}.{name}" for name in names if not name.startswith("__")}
    missing = sorted(wanted - {symbol["name"] for symbol in symbols})
    return [f"{name}: not seen by pyright" for name in missing]


def main() -> None:
    """Prints a line for each package, or exits with the symbols that are wrong."""
    sys.path.insert(0, str(ROOT))
    wrong: list[str] = []
    for package in PACKAGES:
        symbols = report(package)["symbols"]
        found = incomplete(symbols) + unseen(package, symbols)
        public = sum(symbol["isExported"] for symbol in symbols)
        print(f"{package}: {public} public symbols, {'incomplete' if found else 'all typed'}")
        wrong += found
    if wrong:
        sys.exit("\n".join(["These types are not known in full:", *wrong]))


if __name__ == "__main__":
    main()
