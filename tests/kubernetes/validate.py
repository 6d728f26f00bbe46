# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Holds each resource of YAML files against the schemas of the three newest minor versions, and asks the
policy of tenants about pods."""
import sys

import celpy
import kubernetes_validate
import yaml

VERSIONS = sorted(
    {tuple(map(int, version.split(".")[:2])) for version in kubernetes_validate.utils.all_versions()}
)[-3:]


def schemas(path, resource):
    failures = 0
    for version in ("%d.%d" % pair for pair in VERSIONS):
        try:
            kubernetes_validate.validate(resource, version, strict=True)
            print(f"{path}: {resource['kind']}: right in {version}")
        except Exception as error:  # a schema that is not there fails, too
            failures += 1
            print(f"{path}: {resource['kind']}: {version}: {error}")
    return failures


def evaluate(expression, values):
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    return program.evaluate({name: celpy.json_to_cel(value) for name, value in values.items()})


def allows(policy, namespace, pod):
    """What the API server does with a policy: variables in their order, then all validations."""
    values = {"object": pod, "namespaceObject": namespace, "variables": {}}
    for variable in policy["spec"]["variables"]:
        values["variables"][variable["name"]] = evaluate(variable["expression"], values)
    return all(evaluate(one["expression"], values) for one in policy["spec"]["validations"])


def tenants(policy):
    def container(*pools):
        limits = {f"virtio-ism/{pool}": 1 for pool in pools}
        return {"resources": {"limits": {"cpu": 1, **limits}}}

    def pod(*containers, first=None, annotations=None):
        spec = {"containers": list(containers)} | ({"initContainers": [first]} if first else {})
        metadata = {"name": "pod"} | ({"annotations": annotations} if annotations else {})
        return {"metadata": metadata, "spec": spec}

    red = {"metadata": {"labels": {"virtio-ism/tenant": "red"}}}
    other = {"metadata": {"labels": {"team": "red"}}}
    bare = {"metadata": {}}
    plain = {"image": "nginx"}
    cases = [
        (True, red, pod(container("red"))),
        (True, red, pod(container("red"), plain, first=container("red"))),
        (False, red, pod(container("blue"))),
        (False, red, pod(container("red"), container("blue"))),
        (False, red, pod(container("red", "blue"))),
        (False, red, pod(container("red"), first=container("blue"))),
        (False, red, pod(container("any"))),
        (False, other, pod(container("red"))),
        (False, bare, pod(container("any"))),
        (True, other, pod(plain, container())),
        (True, bare, pod(plain)),
        (True, bare, pod({"resources": {}})),
        (False, red, pod(plain, annotations={"cdi.k8s.io/x": "virtio-ism/fabric=blue"})),
        (True, red, pod(container("red"), annotations={"cdi.k8s.io/x": "nvidia.com/gpu=0"})),
    ]
    wrong = [case for case in cases if bool(allows(policy, *case[1:])) != case[0]]
    print(f"the policy of tenants: {len(cases) - len(wrong)} of {len(cases)} pods as they should be")
    for case in wrong:
        print(f"should be {'admitted' if case[0] else 'refused'}: {case[1:]}")
    return len(wrong)


def main(files):
    failures = policies = 0
    for path in files:
        with open(path, encoding="utf-8") as file:
            resources = [one for one in yaml.safe_load_all(file) if one]
        for resource in resources:
            failures += schemas(path, resource)
            if resource["kind"] == "ValidatingAdmissionPolicy":
                policies += 1
                failures += tenants(resource)
    return failures or not policies


sys.exit(1 if main(sys.argv[1:]) else 0)
