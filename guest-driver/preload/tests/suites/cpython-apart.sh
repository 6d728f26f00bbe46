# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# CPython's test_socket, with each test's client in a process of its own, so that SMC carries the
# connections.

# shellcheck source=cpython.sh
. "$here/cpython.sh"

run() {
    python "$1" "$here/cpython.py" --apart test_socket
}
