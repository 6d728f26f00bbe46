// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Servers whose listener gets into the hands of a program without the library.

use crate::bed::{Net, Place, Program};
use crate::case::{Carried, times};
use crate::nginx;
use crate::script::{Script, code};

/// The client of each of these servers: the same request again and again.
const CLIENT: &str = r#"
for n in $(seq $N); do
    got=$(curl -sS --max-time 20 http://$A:$P/$WHAT) || fail "request $n"
    [ "$got" = "$WANTED" ] || fail "request $n: $got"
done
rate $N
"#;

fn of_web_server(what: &str, wanted: &str) -> String {
    format!("WHAT={what}\nWANTED='{wanted}'\n{CLIENT}")
}

/// Debian's `service nginx upgrade`: nginx passes no environment on to the new program. The first
/// clients come before the upgrade.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn nginx_upgrade() {
    let net = Net::new();
    let server = |place: &Place| {
        std::fs::write(place.dir.join("answer"), "ready").unwrap();
        let line = nginx(place).line();
        let file = place.dir.join("nginx.conf");
        // nginx changes its program only as a daemon, detached from its starter.
        let text = std::fs::read_to_string(&file).unwrap().replace("daemon off;", "");
        std::fs::write(&file, text).unwrap();
        let end = "trap 'kill $(cat $D/pid $D/pid.oldbin 2>/dev/null); exit 0' TERM\n";
        // nginx executes the path of its own start.
        let line = line.replacen("nginx", "$(PATH=$PATH:/usr/sbin command -v nginx)", 1);
        place.script("server", &format!("{end}{line}\nwhile :; do sleep 0.1; done\n"))
    };
    let upgrade = r#"
        ask() { curl -sS --max-time 20 http://$A:$P/answer | grep -qx ready || fail "$*"; }
        ask before
        old=$(cat $D/pid)
        kill -USR2 $old
        until [ -s $D/pid.oldbin ] && [ -s $D/pid ]; do sleep 0.05; done
        for n in $(seq 10); do ask beside $n; done
        kill -QUIT $old
        while kill -0 $old 2>/dev/null; do sleep 0.05; done
    "#;
    Script {
        name: "nginx, upgrade",
        needs: &["nginx", "curl"],
        server: &server,
        client: &(upgrade.to_owned() + &of_web_server("answer", "ready")),
        count: times(20, 100),
        carried: Carried::Both,
    }
    .run(&net);
}

/// A server that accepts from the listener given at its start, as a static program.
fn activated(place: &Place) -> String {
    let program = place.dir.join("activated");
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-static", "-o"]).arg(&program).arg(code("activated.c"));
    assert!(compiler.status().unwrap().success());
    program.display().to_string()
}

/// The first client starts the serving program.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn socket_activation() {
    let net = Net::new();
    let python = |place: &Place| {
        std::fs::write(place.dir.join("answer"), "ready").unwrap();
        format!("python3 -S {} {}", code("activated.py"), place.dir.display())
    };
    type Activated<'a> = (&'a str, &'a dyn Fn(&Place) -> String);
    // The environment is cleaned, so neither program has the library.
    let programs: [Activated<'_>; 2] =
        [("socket activation", &python), ("socket activation, static", &activated)];
    for (name, program) in programs {
        let server = |place: &Place| {
            let Place { address, port, .. } = place;
            let program = program(place);
            Program::new(format!("systemd-socket-activate -l {address}:{port} {program}"))
        };
        Script {
            name,
            needs: &["systemd-socket-activate", "python3", "cc", "curl"],
            server: &server,
            client: &of_web_server("answer", "ready"),
            count: times(10, 50),
            carried: Carried::Never,
        }
        .run(&net);
    }
}

/// inetd passes the listener to an accepting program, and takes the listener back when the program
/// ends.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn inetd_that_waits() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let program = activated(place);
        let text = format!("{address}:{port} stream tcp wait root {program} static\n");
        std::fs::write(dir.join("inetd.conf"), text).unwrap();
        Program::new(format!("/usr/sbin/inetd -i {}/inetd.conf", dir.display()))
    };
    Script {
        name: "inetd, wait",
        needs: &["/usr/sbin/inetd", "cc", "curl"],
        server: &server,
        client: &of_web_server("answer", "ready"),
        count: times(10, 50),
        carried: Carried::Never,
    }
    .run(&net);
}

/// The master of dovecot listens, and starts the accepting programs in a cleaned environment.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn dovecot() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let here = dir.display();
        let text = format!(
            "base_dir = {here}/run\nlog_path = {here}/log\nprotocols = imap\nssl = no\n\
             listen = {address}\ndefault_internal_user = nobody\ndefault_login_user = nobody\n\
             default_internal_group = nogroup\nstate_dir = {here}/state\n\
             service imap-login {{\n inet_listener imap {{\n port = {port}\n }}\n\
             inet_listener imaps {{\n port = 0\n }}\n chroot =\n}}\n\
             service anvil {{\n chroot =\n}}\n\
             passdb {{\n driver = static\n args = nopassword=y\n}}\n\
             userdb {{\n driver = static\n args = uid=nobody gid=nogroup home={here}/home\n}}\n"
        );
        std::fs::write(dir.join("dovecot.conf"), text).unwrap();
        Program::new(format!("dovecot -F -c {here}/dovecot.conf"))
    };
    let client = r#"
        for n in $(seq $N); do
            exec 5<>/dev/tcp/$A/$P || fail "connection $n"
            read -t 20 -r line <&5 || fail "no banner $n"
            case $line in '* OK'*) ;; *) fail "banner $n: $line" ;; esac
            printf 'a logout\r\n' >&5
            grep -q 'a OK' <&5 || fail "logout $n"
            exec 5>&-
        done
        rate $N
    "#;
    Script {
        name: "dovecot",
        needs: &["dovecot"],
        server: &server,
        client,
        count: times(10, 50),
        carried: Carried::Never,
    }
    .run(&net);
}
