# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The tests of Go's packages net and net/http, as static programs whose system calls are taken over.

obtain() {
    needs go golang-go
    local package
    if [ ! -e "$(go env GOROOT)/src/net/net_test.go" ]; then
        echo "missing: the tests of Go (package golang-src)"
        return 1
    fi
    for package in net net/http; do
        mkdir -p "$cache/go/$package"
        [ -e "$cache/go/$package/tests" ] ||
            CGO_ENABLED=0 GO111MODULE=off go test -c -o "$cache/go/$package/tests" "$package"
    done
}

run() {
    local door=() package sources
    sources=$(go env GOROOT)/src
    [ "$1" = without ] || door=(--system-calls)
    for package in net net/http; do
        cd "$sources/$package"
        # Left out: TestCmd... and TestOmit..., which call the compiler.
        on "$1" "${door[@]}" "$cache/go/$package/tests" -test.v -test.short -test.run '^Test([^CO]|C[^m]|O[^m])' 2>&1 |
            tee /dev/stderr | sed -n \
            -e "s,^ *--- PASS: \([^ ]*\).*,ok\t$package.\1,p" \
            -e "s,^ *--- FAIL: \([^ ]*\).*,failed\t$package.\1,p" \
            -e "s,^ *--- SKIP: \([^ ]*\).*,skipped\t$package.\1,p" >>"$RESULTS" || true
    done
}
