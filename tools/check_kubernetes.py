"""Check a file of Kubernetes objects against Kubernetes' own schemas; the pods of a RayCluster, too.

    python tools/check_kubernetes.py deploy/kuberay.yaml

The RayCluster's own fields are KubeRay's: its operator checks them when the file is applied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

VERSION = "1.32"


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object that Kubernetes knows, with a name for messages."""
    for document in yaml.safe_load_all(path.read_text()):
        name = f"{document['kind']} {document['metadata']['name']}"
        if document["kind"] != "RayCluster":
            yield name, document
            continue
        spec = document["spec"]
        groups = {
            "head": spec["headGroupSpec"],
            **{group["groupName"]: group for group in spec["workerGroupSpecs"]},
        }
        for group, template in groups.items():
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group}, **template["template"]}
            yield f"{name}, pod of {group}", pod


def main() -> None:
    for name, found in objects(Path(sys.argv[1])):
        try:
            kubernetes_validate.validate(found, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise SystemExit(f"{name}: {error.message}") from error
        print(f"{name}: valid in Kubernetes {VERSION}")


if __name__ == "__main__":
    main()
