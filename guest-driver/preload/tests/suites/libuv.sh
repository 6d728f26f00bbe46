# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# libuv: `uv_run_tests`, built from Debian's source package. Some tests start a helper process, with
# which they speak over TCP.

obtain() {
    source_of libuv1
    [ ! -e "$cache/libuv1/run-tests" ] || return 0
    needs gcc gcc
    needs make make
    cd "$cache/libuv1/source"
    # CMakeLists.txt has the files of all systems; building with it would take another package.
    local files others='aix|bsd|cygwin|darwin|fsevents|getentropy|haiku|hurd|ibmi|kqueue'
    others+='|no-proctitle|sysinfo|os390|posix-|pthread-fixes|qnx|sunos|win|benchmark'
    mapfile -t files < <(grep -o '\(src\|test\)/[a-z0-9/-]*\.c' CMakeLists.txt | grep -Ev "$others" | sort -u)
    make -s -r -j2 -f - run-tests OBJECTS="${files[*]/%.c/.o}" <<'END'
run-tests: $(filter test/%, $(OBJECTS)) libuv.a
	gcc -o $@ $^ -lpthread -ldl -lrt
libuv.a: $(filter src/%, $(OBJECTS))
	ar rc $@ $^
%.o: %.c
	gcc -O1 -w -Iinclude -Isrc -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -D_LARGEFILE_SOURCE -c $< -o $@
END
    mv run-tests ..
}

run() {
    cd "$cache/libuv1/source"
    local filter=. without=' ' program=("$cache/libuv1/run-tests") tests
    # The quick runs are at the same time, and a Unix socket in /tmp would be that of both.
    ! $SMC_SUITES_QUICK || without=pipe
    ! $SMC_SUITES_QUICK || filter='^connection_fail\|^tcp_\|^delayed_accept\|^multiple_listen\|^poll_\|^shutdown\|^socket_buffer'
    # It refuses to run as root.
    if [ "$(id -u)" = 0 ]; then
        cp -r "$cache/libuv1/run-tests" test "$own"
        chmod -R o+rwX "$own"
        cd "$own"
        program=(setpriv --reuid=65534 --regid=65534 --clear-groups ./run-tests)
    fi
    mapfile -t tests < <("${program[@]}" --list | sed "s/ .*//" | grep "$filter" | grep -v "$without")
    # All tests use the same port.
    on "$1" bash "$here/each.sh" 1 60 "${program[@]}" -- "${tests[@]}"
}
