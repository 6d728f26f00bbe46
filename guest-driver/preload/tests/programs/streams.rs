// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Small programs connecting a socket with files, pipes or other programs.

use crate::bed::{Net, Place, Program};
use crate::case::{Carried, times};
use crate::script::{Script, code};

/// socat, running a program for each connection.
fn socat_exec(place: &Place, what: &str) -> Program {
    let Place { address, port, .. } = place;
    place.data("sent", 3_000_000);
    Program::new(format!("socat TCP-LISTEN:{port},bind={address},fork,reuseaddr")).and(&[what])
}

/// Sends a file, ends its direction, and reads the hash of the arrived bytes.
const HASHES: &str = r#"
hash=$(sha256sum <$D/sent)
for n in $(seq $N); do
    got=$(socat -t 20 - TCP:$A:$P <$D/sent)
    [ "$got" = "$hash" ] || fail "hash $n is $got"
done
rate $N
"#;

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn socat() {
    let net = Net::new();
    for (name, what, carried) in [
        ("socat EXEC", "EXEC:sha256sum", Carried::Both),
        ("socat EXEC,nofork", "EXEC:sha256sum,nofork", Carried::Never),
    ] {
        Script {
            name,
            needs: &["socat"],
            server: &|place| socat_exec(place, what),
            client: HASHES,
            count: times(5, 30),
            carried,
        }
        .run(&net);
    }
    Script {
        name: "socat EXEC:cat",
        needs: &["socat"],
        server: &|place| socat_exec(place, "EXEC:cat"),
        client: r#"
        for n in $(seq $N); do
            socat -t 20 - TCP:$A:$P <$D/sent >$D/got
            cmp $D/sent $D/got
        done
        rate $N
        "#,
        count: times(5, 30),
        carried: Carried::Both,
    }
    .run(&net);
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn nc_and_ncat() {
    let net = Net::new();
    let ncat = |place: &Place| {
        let Place { address, port, .. } = place;
        place.data("sent", 3_000_000);
        Program::new(format!("ncat -lk {address} {port}"))
            .and(&["--sh-exec", "head -c 3000000 | sha256sum"])
    };
    for (name, client) in [("nc", "nc.openbsd $A $P"), ("ncat", "ncat --no-shutdown $A $P")] {
        let client = HASHES.replace("socat -t 20 - TCP:$A:$P", client);
        Script {
            name: &format!("ncat --sh-exec, {name}"),
            needs: &["ncat", "nc.openbsd"],
            server: &ncat,
            client: &client,
            count: times(3, 20),
            carried: Carried::Both,
        }
        .run(&net);
    }
    Script {
        name: "nc, both ends",
        needs: &["nc.openbsd"],
        server: &|place| {
            place.data("sent", 40_000_000);
            place.script("server", "exec nc.openbsd -N -l $A $P <$D/sent\n")
        },
        client: "nc.openbsd $A $P </dev/null >$D/got\ncmp $D/sent $D/got\nrate 1\n",
        count: 1,
        carried: Carried::Both,
    }
    .run(&net);
}

/// A server that appends the received bytes to a file.
fn counting(place: &Place) -> Program {
    let Place { address, port, dir } = place;
    let to = dir.join("lines");
    let _ = std::fs::remove_file(&to);
    std::fs::write(&to, "").unwrap();
    Program::new(format!("/usr/bin/python3 {} {address} {port}", code("count.py")))
        .and(&[&to.display().to_string()])
}

/// Waits until the server has got all lines, and checks that there are no others.
const COUNTED: &str = r#"
for i in $(seq 100); do
    [ $(wc -l <$D/lines) -lt $N ] || break
    sleep 0.1
done
! grep broken $D/lines || fail "broken lines"
for n in $(seq $N); do echo "message $n"; done | sort >$D/wanted
grep -o 'message [0-9]*$' $D/lines | sort | cmp - $D/wanted || fail "$(wc -l <$D/lines) of $N lines"
rate $N
"#;

/// For each message a process connects, sends, closes and exits.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn logger() {
    let net = Net::new();
    let client = format!(
        "seq $N | xargs -P 3 -I NUMBER logger --tcp --server $A --port $P 'message NUMBER'\n\
         {COUNTED}"
    );
    Script {
        name: "logger --tcp",
        needs: &["logger", "/usr/bin/python3"],
        server: &counting,
        client: &client,
        count: times(40, 1000),
        carried: Carried::Both,
    }
    .run(&net);
}

/// The shell's own connections: writes by stdio, and duplicated descriptors.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn bash() {
    let net = Net::new();
    let client = format!("for n in $(seq $N); do echo message $n >/dev/tcp/$A/$P; done\n{COUNTED}");
    Script {
        name: "bash, one way",
        needs: &["/usr/bin/python3"],
        server: &counting,
        client: &client,
        count: times(20, 200),
        carried: Carried::Both,
    }
    .run(&net);
    Script {
        name: "bash, to and fro",
        needs: &["socat"],
        server: &|place| socat_exec(place, "EXEC:cat"),
        client: r#"
        for n in $(seq $N); do
            exec 3<>/dev/tcp/$A/$P
            for i in {1..50}; do
                echo "line $i" >&3
                read -r line <&3
                [ "$line" = "line $i" ] || fail "$line is not line $i"
            done
            exec 3>&-
        done
        rate $((N * 50))
        "#,
        count: times(3, 20),
        carried: Carried::Both,
    }
    .run(&net);
}

/// A client and a server that read and write by stdio.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn whois() {
    let net = Net::new();
    let server = |place: &Place| {
        place.script(
            "answer",
            "read -r query\nfor i in {1..500}; do echo \"${query%$'\\r'}: line $i\"; done\n",
        );
        let answer = place.dir.join("answer.sh").display().to_string();
        socat_exec(place, &format!("EXEC:bash {answer},nofork"))
    };
    Script {
        name: "whois",
        needs: &["whois", "socat"],
        server: &server,
        client: r#"
        for n in $(seq $N); do
            lines=$(whois -h $A -p $P question | grep -c '^question: line')
            [ $lines = 500 ] || fail "$lines lines"
        done
        rate $N
        "#,
        count: times(5, 30),
        carried: Carried::Never,
    }
    .run(&net);
}

/// A server that closes right after the accept: the port is open.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn nc_scans() {
    let net = Net::new();
    Script {
        name: "nc -z",
        needs: &["nc.openbsd", "socat"],
        server: &|place| socat_exec(place, "EXEC:true"),
        client: "for n in $(seq $N); do nc.openbsd -z -w 5 $A $P; done\nrate $N\n",
        count: times(5, 50),
        carried: Carried::Never,
    }
    .run(&net);
}
