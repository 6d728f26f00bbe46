# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Node.js: its tests of net and http, of the version that Debian has; node itself is the one installed.

obtain() {
    needs node nodejs
    source_of nodejs '*/test/parallel/test-net-*' '*/test/parallel/test-http-*' '*/test/parallel/test-tcp-*' \
        '*/test/parallel/test-cluster-*' '*/test/common/*' '*/test/fixtures/*'
}

run() {
    cd "$cache/nodejs/source/test/parallel"
    on "$1" bash "$here/each.sh" 2 60 node -- test-net-* test-http-* test-tcp-* test-cluster-*
}
