# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Holds each resource of YAML files against the schemas of the three newest minor versions."""
import sys

import kubernetes_validate
import yaml

VERSIONS = sorted(
    {tuple(map(int, version.split(".")[:2])) for version in kubernetes_validate.utils.all_versions()}
)[-3:]


def main(files):
    failures = 0
    for path in files:
        with open(path, encoding="utf-8") as file:
            resources = [one for one in yaml.safe_load_all(file) if one]
        for resource in resources:
            if resource["apiVersion"].startswith("kustomize"):
                continue
            for version in ("%d.%d" % pair for pair in VERSIONS):
                try:
                    kubernetes_validate.validate(resource, version, strict=True)
                    print(f"{path}: {resource['kind']}: right in {version}")
                except Exception as error:  # a schema that is not there fails, too
                    failures += 1
                    print(f"{path}: {resource['kind']}: {version}: {error}")
    return failures


sys.exit(1 if main(sys.argv[1:]) else 0)
