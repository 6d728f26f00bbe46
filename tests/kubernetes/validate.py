# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Holds each resource of YAML files against the schemas of the three newest minor versions, and asks the
policies about pods, claims and slices."""
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


def allows(policy, namespace, thing, **more):
    """What the API server does with a policy: variables in their order, then all validations."""
    values = {"object": thing, "namespaceObject": namespace, "variables": {}, **more}
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
        (False, red, pod({"resources": {"limits": {"deviceclass.resource.kubernetes.io/virtio-ism-red": 1}}})),
        (False, other, pod(container("red"))),
        (False, bare, pod(container("any"))),
        (True, other, pod(plain, container())),
        (True, bare, pod(plain)),
        (True, bare, pod({"resources": {}})),
        (False, red, pod(plain, annotations={"cdi.k8s.io/x": "virtio-ism/fabric=blue"})),
        (True, red, pod(container("red"), annotations={"cdi.k8s.io/x": "nvidia.com/gpu=0"})),
    ]
    return judge("the policy of tenants", cases, lambda case: allows(policy, *case))


def judge(what, cases, answer):
    wrong = [case for case in cases if bool(answer(case[1:])) != case[0]]
    print(f"{what}: {len(cases) - len(wrong)} of {len(cases)} as they should be")
    for case in wrong:
        print(f"should be {'admitted' if case[0] else 'refused'}: {case[1:]}")
    return len(wrong)


def claims(policy):
    def claim(*requests):
        return {"kind": "ResourceClaim", "spec": {"devices": {"requests": list(requests)}}}

    def exactly(name):
        return {"name": "r", "exactly": {"deviceClassName": name}}

    red = {"metadata": {"labels": {"virtio-ism/tenant": "red"}}}
    first = {"name": "r", "firstAvailable": [{"deviceClassName": "virtio-ism-blue"}]}
    template = {"kind": "ResourceClaimTemplate", "spec": {"spec": claim(exactly("virtio-ism-blue"))["spec"]}}
    cases = [
        (True, red, claim(exactly("virtio-ism-red"), exactly("gpu.example.com"))),
        (False, red, claim(exactly("virtio-ism-red"), exactly("virtio-ism-blue"))),
        (False, red, claim(first)),
        (False, red, template),
        (False, {"metadata": {}}, claim(exactly("virtio-ism-any"))),
        (True, {"metadata": {}}, {"kind": "ResourceClaim", "spec": {}}),
    ]
    return judge("the policy of claims", cases, lambda case: allows(policy, *case))


def slices(policy):
    slice = {"spec": {"nodeName": "node-1"}}
    key = "authentication.kubernetes.io/node-name"

    def asked(operation, extra):
        return {"operation": operation, "userInfo": {"username": "driver", **extra}}

    cases = [
        (True, asked("UPDATE", {"extra": {key: ["node-1"]}})),
        (True, asked("DELETE", {"extra": {key: ["node-1"]}})),
        (False, asked("CREATE", {"extra": {key: ["node-2"]}})),
        (False, asked("DELETE", {"extra": {}})),
        (False, asked("CREATE", {})),
    ]
    ask = lambda case: allows(policy, {}, slice, request=case[0], oldObject=slice)
    return judge("the policy of slices", cases, ask)


POLICIES = {"virtio-ism-tenants": tenants, "virtio-ism-claims": claims, "virtio-ism-slices": slices}


def main(files):
    failures = policies = 0
    for path in files:
        with open(path, encoding="utf-8") as file:
            resources = [one for one in yaml.safe_load_all(file) if one]
        for resource in resources:
            failures += schemas(path, resource)
            if resource["kind"] == "ValidatingAdmissionPolicy":
                policies += 1
                failures += POLICIES[resource["metadata"]["name"]](resource)
    return failures or not policies


sys.exit(1 if main(sys.argv[1:]) else 0)
