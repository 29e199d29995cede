# SPDX-License-Identifier: Apache-2.0
"""Generate backend/cedar/v1 (messages, service stubs, type stubs) from protos/. Run by `make setup` and the wheel build."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]


def _plugin(name: str) -> str:
    """Beside the interpreter (a virtual environment that is not activated), else on PATH (an isolated wheel build)."""
    found = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if found is None:
        raise SystemExit(f"build_protos: {name} not found; install mypy-protobuf")
    return found


def main() -> int:
    """Run protoc with the grpc and mypy plugins; returns its exit status."""
    out = ROOT / "backend"
    (out / "cedar" / "v1").mkdir(parents=True, exist_ok=True)
    arguments = [
        "protoc",
        f"--proto_path={ROOT / 'protos'}",
        f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc')}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        str(ROOT / "protos" / "cedar" / "v1" / "engine.proto"),
    ]
    status = protoc.main(arguments)
    (out / "cedar" / "v1" / "__init__.py").write_text('"""Generated from protos/cedar/v1; never edited."""\n')
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
