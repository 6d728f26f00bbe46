// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! HAProxy in front of nginx.

use crate::bed::{Net, Place, Program};
use crate::case::{Carried, times};
use crate::common::free_port;
use crate::nginx_with;
use crate::script::{SERVE, Script};

/// Settings of HAProxy, and nginx behind it. The server's script starts both.
fn haproxy(place: &Place, defaults: &str, start: &str) -> Program {
    let Place { address, port, dir } = place;
    let here = dir.display();
    let behind = Place { address, port: free_port(), dir: dir.clone() };
    let nginx = nginx_with(&behind, "", "");
    let text = format!(
        "global\n  nbthread 1\n  maxconn 500\n\
         \x20 stats socket {here}/haproxy.sock mode 600 level admin expose-fd listeners\n\
         defaults\n  timeout connect 10s\n  timeout client 200s\n  timeout server 200s\n{defaults}\n\
         frontend front\n  bind {address}:{port}\n  default_backend back\n\
         backend back\n  server one {address}:{}\n",
        behind.port
    );
    std::fs::write(dir.join("haproxy.cfg"), text).unwrap();
    let nginx = nginx.line();
    place.script("server", &format!("run {nginx}\nawait_port {}\n{start}\n{SERVE}", behind.port))
}

/// Others are served at once while one client reads slowly.
const BESIDE_A_SLOW_READER: &str = r#"
curl -sS --fail --limit-rate $((40000000 / N)) http://$A:$P/large -o $D/slow & slow=$!
done=0
while kill -0 $slow 2>/dev/null; do
    curl -sS --fail --max-time 5 http://$A:$P/small -o $D/got
    cmp $D/small $D/got
    done=$((done + 1))
    sleep 0.02
done
wait $slow
cmp $D/large $D/slow
rate $done
"#;

const ONCE: &str = "run haproxy -db -f $D/haproxy.cfg";
const NEEDS: &[&str] = &["haproxy", "nginx", "wrk", "curl"];

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn haproxy_modes() {
    let net = Net::new();
    for (name, defaults) in [
        ("HAProxy, TCP", "  mode tcp"),
        ("HAProxy, HTTP", "  mode http"),
        ("HAProxy, HTTP, closing", "  mode http\n  option httpclose"),
        ("HAProxy, splice", "  mode tcp\n  option splice-response\n  option splice-request"),
    ] {
        Script {
            name,
            needs: NEEDS,
            server: &|place| haproxy(place, defaults, ONCE),
            client: r#"
            for n in 1 2 3; do
                curl -sS --fail http://$A:$P/large -o $D/got
                cmp $D/large $D/got
            done
            wrk -t 1 -c 10 -d $N http://$A:$P/small >$D/wrk
            ! grep -E 'Socket errors|Non-2xx' $D/wrk || fail "$(cat $D/wrk)"
            echo "per second: $(awk '/Requests.sec/ {print $2}' $D/wrk)"
            "#,
            count: crate::case::seconds(),
            // HAProxy is a client of nginx.
            carried: Carried::Server,
        }
        .run(&net);
    }
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn haproxy_splices_for_a_slow_reader() {
    let net = Net::new();
    Script {
        name: "HAProxy, splice, slow reader",
        needs: NEEDS,
        server: &|place| haproxy(place, "  mode http\n  option splice-response", ONCE),
        client: BESIDE_A_SLOW_READER,
        count: times(3, 60),
        carried: Carried::Server,
    }
    .run(&net);
}

/// Each new process of HAProxy gets the listening sockets from the one before, which serves its
/// connections to their ends.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn haproxy_reloads() {
    let net = Net::new();
    let start = r#"
    run haproxy -db -f $D/haproxy.cfg
    for n in 1 2 3 4; do
        old=$!
        sleep 0.8
        run haproxy -db -f $D/haproxy.cfg -x $D/haproxy.sock -sf $old
    done
    "#;
    Script {
        name: "HAProxy, reloads",
        needs: NEEDS,
        server: &|place| haproxy(place, "  mode http", start),
        client: BESIDE_A_SLOW_READER,
        count: 6,
        carried: Carried::Server,
    }
    .run(&net);
}
