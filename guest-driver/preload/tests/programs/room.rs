// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clients that write everything before reading, and relays that do the same.

use crate::bed::{Net, Place};
use crate::case::{Carried, times};
use crate::script::{SERVE, Script, code};

/// A client of `code/ahead.py` writing `n` units of a kind.
fn run(
    net: &Net,
    name: &str,
    (needs, carried): (&[&str], Carried),
    server: &str,
    (what, n): (&str, u32),
) {
    let ahead = code("ahead.py");
    let client = format!(
        r#"
        for i in $(seq $N); do
            /usr/bin/python3 {ahead} {what} $A $P {n} || fail "{what} $i"
        done
        rate $N
        "#
    );
    Script {
        name,
        needs,
        server: &|place: &Place| place.script("server", &format!("{server}{SERVE}")),
        client: &client,
        count: times(2, 10),
        carried,
    }
    .run(net);
}

/// An echo server of one thread, reading and writing by turns.
const ECHO: &str = r"
echo_server() {
    run /usr/bin/python3 -c '
import socket, sys, threading
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
def serve(stream):
    while data := stream.recv(1 << 14):
        stream.sendall(data)
    stream.close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
' $A $1
    await_port $1
}
";

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn ahead_of_memcached() {
    let server = r"
    run memcached $([ $(id -u) != 0 ] || echo -u root) -l $A -p $P -U 0 -t 2
    ";
    run(
        &Net::new(),
        "memcached, 40,000 gets ahead",
        (&["memcached"], Carried::Both),
        server,
        ("memcached", 40_000),
    );
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn ahead_of_postgresql() {
    let server = r#"
    bin=$(echo /usr/lib/postgresql/*/bin | tail -n 1)
    data=$(mktemp -d)
    # The server refuses to run as root.
    as=()
    if [ $(id -u) = 0 ]; then
        as=(setpriv --reuid postgres --regid postgres --clear-groups)
        chown postgres $data
    fi
    cd /
    "${as[@]}" $bin/initdb -D $data -A trust -U postgres -N >$D/initdb 2>&1
    echo "host all all 0.0.0.0/0 trust" >>$data/pg_hba.conf
    run "${as[@]}" $bin/postgres -D $data -h $A -p $P -k $data -F
    "#;
    run(
        &Net::new(),
        "PostgreSQL, 10,000 queries ahead",
        (&["postgres"], Carried::Both),
        server,
        ("postgres", 10_000),
    );
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn ahead_of_relays() {
    let net = Net::new();
    let exec = "run socat TCP-LISTEN:$P,bind=$A,fork,reuseaddr EXEC:cat\n";
    run(&net, "socat EXEC:cat, 2 MB ahead", (&["socat"], Carried::Both), exec, ("echo", 2_000_000));
    let relay = format!(
        "{ECHO} echo_server $((P + 1))\n\
         run socat TCP-LISTEN:$P,bind=$A,fork,reuseaddr TCP:$A:$((P + 1))\n"
    );
    run(
        &net,
        "socat as a relay, 8 MB ahead",
        (&["socat"], Carried::Server),
        &relay,
        ("echo", 8_000_000),
    );
    if cfg!(debug_assertions) {
        println!(
            "microsocks is left out: its threads have 8 KiB of stack, too little for a debug build"
        );
        return;
    }
    let proxy = format!(
        "{ECHO} echo_server $((P + 1))\n\
         run microsocks -i $A -p $P\n"
    );
    run(
        &net,
        "microsocks, 8 MB ahead",
        (&["microsocks"], Carried::Server),
        &proxy,
        ("socks", 8_000_000),
    );
}
