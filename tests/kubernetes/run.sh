#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The manifests of packaging/kubernetes: against the schemas of three minor versions of Kubernetes, and
# applied to the cluster that KUBECONFIG names, with two services on SMC-D.
#
# It needs python3 with venv, and downloads the schemas once (PyPI: kubernetes-validate). Without
# KUBECONFIG it says that no cluster was tested; with it, kubectl and the image of
# packaging/kubernetes/Containerfile on the nodes are needed.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/containers/common.sh
command -v python3 >/dev/null || missing "Kubernetes: there is no python3"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism/kubernetes-validate
if [ ! -x "$cache/bin/python3" ]; then
    python3 -m venv "$cache" && "$cache/bin/pip" -q install kubernetes-validate pyyaml ||
        missing "Kubernetes: kubernetes-validate cannot be installed"
fi
"$cache/bin/python3" tests/kubernetes/validate.py packaging/kubernetes/*.yaml

if [ -z "${KUBECONFIG:-}" ]; then
    echo "NOT TESTED: no cluster, since KUBECONFIG names none"
    exit 0
fi
kubectl version
kubectl apply -k packaging/kubernetes
kubectl -n vhost-device-ism rollout status daemonset/node --timeout 300s
kubectl apply -f packaging/kubernetes/example.yaml
kubectl -n smc-example wait --for condition=complete job/client --timeout 300s
said=$(kubectl -n smc-example exec deploy/web -- smc stat totals)
echo "$said"
kubectl delete -f packaging/kubernetes/example.yaml
if [ "$(kubectl get nodes -o name | wc -l)" = 1 ]; then
    expect "smc stat totals" 'nginx [0-9]+ +[1-9]'
fi
echo "kubernetes: all done"
