// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Web servers of several processes or threads.

use std::path::Path;

use crate::bed::{Net, Place, Program};
use crate::case::{Carried, times};
use crate::nginx;
use crate::script::{Script, code};

/// Runs a web server whose clients ask for large and small files, send a large one, and ask for
/// small ones from eight connections at a time: over the same ones, and over a new one each.
fn web(name: &str, needs: &[&str], server: &dyn Fn(&Place) -> String, carried: Carried, net: &Net) {
    let server = |place: &Place| {
        std::fs::write(place.dir.join("small"), vec![b'x'; 612]).unwrap();
        place.data("large", 10_000_000);
        Program::new(server(place))
    };
    let needs: Vec<&str> = needs.iter().copied().chain(["ab", "curl"]).collect();
    for (kind, options) in [("", "-k"), (", a connection each", "")] {
        let client = CLIENT.replace("OPTIONS", options);
        Script {
            name: &format!("{name}{kind}"),
            needs: &needs,
            server: &server,
            client: &client,
            count: times(300, 5000),
            carried,
        }
        .run(net);
    }
}

const CLIENT: &str = r#"
for n in 1 2 3; do
    curl -sS --fail http://$A:$P/large -o $D/got http://$A:$P/small -o $D/got.small
    cmp $D/large $D/got
    cmp $D/small $D/got.small
done
if [ ! -e $D/only_files ]; then
    hash=$(curl -sS --fail --data-binary @$D/large http://$A:$P/hash)
    [ "$hash" = "$(sha256sum <$D/large | cut -d ' ' -f 1)" ] || fail "the hash is $hash"
fi
begun=$(date +%s%N)
ab -q -n $N -c 8 OPTIONS http://$A:$P/small >$D/ab
grep -qE "^Complete requests: +$N$" $D/ab || fail "$(cat $D/ab)"
grep -qE '^Failed requests: +0$' $D/ab || fail "$(cat $D/ab)"
! grep -E '^(Non-2xx|Write errors)' $D/ab || fail "$(cat $D/ab)"
rate $N
"#;

/// One connection after the other, and ten at a time.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn nginx_and_ab() {
    let net = Net::new();
    for clients in [1, 10] {
        Script {
            name: &format!("nginx, ab -c {clients}, a connection each"),
            needs: &["nginx", "ab"],
            server: &nginx,
            client: &format!("CLIENTS={clients}\n{EACH}"),
            count: times(300, 5000),
            carried: Carried::Both,
        }
        .run(&net);
    }
}

const EACH: &str = r#"
begun=$(date +%s%N)
ab -q -n $N -c $CLIENTS http://$A:$P/small >$D/ab
grep -qE "^Complete requests: +$N$" $D/ab || fail "$(cat $D/ab)"
grep -qE '^Failed requests: +0$' $D/ab || fail "$(cat $D/ab)"
! grep -E '^(Non-2xx|Write errors)' $D/ab || fail "$(cat $D/ab)"
rate $N
"#;

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn gunicorn() {
    let net = Net::new();
    let here = Path::new(&code("app.py")).parent().unwrap().display().to_string();
    for (kind, needs) in [
        ("sync", &["gunicorn"] as &[&str]),
        ("gthread --threads 4", &["gunicorn"]),
        ("gevent", &["gunicorn", "/usr/lib/python3/dist-packages/gevent/__init__.py"]),
    ] {
        let server = |place: &Place| {
            let Place { address, port, .. } = place;
            format!(
                "gunicorn -w 2 -k {kind} -b {address}:{port} --log-level error --pythonpath {here} \
                 app:wsgi"
            )
        };
        let kind = kind.split(' ').next().unwrap();
        web(&format!("gunicorn, {kind}"), needs, &server, Carried::Both, &net);
    }
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn uvicorn() {
    let net = Net::new();
    let here = Path::new(&code("app.py")).parent().unwrap().display().to_string();
    for (kind, options, needs) in [
        ("asyncio", "--loop asyncio", &["uvicorn"] as &[&str]),
        ("two processes", "--loop asyncio --workers 2", &["uvicorn"]),
        (
            "uvloop",
            "--loop uvloop",
            &["uvicorn", "/usr/lib/python3/dist-packages/uvloop/__init__.py"],
        ),
    ] {
        let server = |place: &Place| {
            let Place { address, port, .. } = place;
            format!(
                "uvicorn --app-dir {here} app:asgi --host {address} --port {port} {options} \
                 --log-level warning"
            )
        };
        web(&format!("uvicorn, {kind}"), needs, &server, Carried::Both, &net);
    }
}

/// The first process accepts and passes the connections to the others by messages.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn node_cluster() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, .. } = place;
        format!("node {} {address} {port}", code("cluster.js"))
    };
    web("Node.js, cluster", &["node"], &server, Carried::Never, &net);
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn apache() {
    let net = Net::new();
    for kind in ["prefork", "event"] {
        let server = |place: &Place| {
            let Place { address, port, dir } = place;
            let here = dir.display();
            let module = |name: &str| {
                format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n")
            };
            let modules = module(&format!("mpm_{kind}")) + &module("authz_core");
            let text = format!(
                "{modules}ServerRoot {here}\nServerName test\nListen {address}:{port}\n\
                 PidFile {here}/pid\nErrorLog {here}/log\nMutex file:{here}\nDocumentRoot {here}\n\
                 User www-data\nGroup www-data\nMaxKeepAliveRequests 0\n\
                 <Directory {here}>\nRequire all granted\n</Directory>\n"
            );
            std::fs::write(dir.join("apache.conf"), text).unwrap();
            std::fs::write(dir.join("only_files"), "").unwrap();
            // apache2 ends its process group.
            format!("setsid apache2 -f {here}/apache.conf -D FOREGROUND")
        };
        web(&format!("Apache, {kind}"), &["apache2"], &server, Carried::Both, &net);
    }
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn lighttpd() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let here = dir.display();
        let text = format!(
            "server.document-root = \"{here}\"\nserver.bind = \"{address}\"\nserver.port = {port}\n\
             server.errorlog = \"{here}/log\"\nserver.max-keep-alive-requests = 1000000\n"
        );
        std::fs::write(dir.join("lighttpd.conf"), text).unwrap();
        std::fs::write(dir.join("only_files"), "").unwrap();
        format!("lighttpd -D -f {here}/lighttpd.conf")
    };
    web("lighttpd", &["lighttpd"], &server, Carried::Both, &net);
}

/// Caddy is a program in Go, whose system calls are taken over on x86-64.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn caddy() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let here = dir.display();
        std::fs::write(dir.join("only_files"), "").unwrap();
        format!(
            "env XDG_DATA_HOME={here} XDG_CONFIG_HOME={here} caddy file-server --root {here} \
             --listen {address}:{port}"
        )
    };
    let carried = if cfg!(target_arch = "x86_64") { Carried::Both } else { Carried::Never };
    web("Caddy", &["caddy"], &server, carried, &net);
}
