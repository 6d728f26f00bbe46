# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# CPython: the files of its test suite that use TCP, each in a process of its own. Most of them have both
# ends of their connections in one process, and so on one device, where SMC does not carry them.

quick=(test_epoll test_select test_socketserver test_httplib test_smtplib test_telnetlib test_asynchat
    test_asyncore)
all=("${quick[@]}" test_poll test_selectors test_ftplib test_socket test_ssl test_httpservers test_xmlrpc test_docxmlrpc test_urllib2_localnet
    test_imaplib test_nntplib test_poplib test_smtpd test_wsgiref test_logging test_os test_subprocess
    test_asyncio.test_base_events test_asyncio.test_buffered_proto test_asyncio.test_events
    test_asyncio.test_selector_events test_asyncio.test_sendfile test_asyncio.test_server
    test_asyncio.test_sock_lowlevel test_asyncio.test_ssl test_asyncio.test_sslproto
    test_asyncio.test_streams test_asyncio.test_subprocess test_asyncio.test_unix_events
    test_concurrent_futures test_multiprocessing_fork test_multiprocessing_forkserver
    test_multiprocessing_spawn)

obtain() {
    update_lists
    local version
    version=$(apt_in_cache apt-cache show python3 | sed -n 's/^Depends:.* python\(3\.[0-9]*\) .*/\1/p' | head -1)
    unpacked "python$version" "python$version-minimal" "libpython$version-"{minimal,stdlib,testsuite}
    ln -sfn "python$version" "$cache/python"
}

# python WITH|WITHOUT ARGUMENT...
python() {
    local how=$1
    shift
    export PYTHONHOME=$cache/python/usr PYTHONDONTWRITEBYTECODE=1
    cd "$own"
    on "$how" "$(echo "$PYTHONHOME"/bin/python3.*)" "$@"
}

run() {
    local tests=("${all[@]}")
    ! $SMC_SUITES_QUICK || tests=("${quick[@]}")
    python "$1" "$here/cpython.py" "${tests[@]}"
}
