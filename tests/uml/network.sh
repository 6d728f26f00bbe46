#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Runs a command in a network namespace through which guests reach each other.
#
#   unshare --net tests/uml/network.sh COMMAND...
set -eu
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
exec "$@"
