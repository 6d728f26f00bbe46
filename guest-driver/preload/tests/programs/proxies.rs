// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! HAProxy, stunnel, Varnish and Squid in front of nginx.

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

/// nginx, and a program in front, begun by `start`.
fn before_nginx(place: &Place, start: &str) -> Program {
    let behind = Place { address: place.address, port: free_port(), dir: place.dir.clone() };
    let nginx = nginx_with(&behind, "", "").line();
    let port = behind.port;
    place.script("server", &format!("B={port}\nrun {nginx}\nawait_port $B\n{start}\n{SERVE}"))
}

/// Both files, several times. The script before defines `fetch`.
const FILES: &str = r#"
for n in $(seq $N); do
    fetch large >$D/got
    cmp $D/large $D/got
    fetch small >$D/got
    cmp $D/small $D/got
done
rate $N
"#;

/// TLS at both ends of a pipe: plain bytes of curl go through a stunnel of its own.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn stunnel() {
    let net = Net::new();
    let start = r#"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
        -subj /CN=smc -keyout $D/key.pem -out $D/certificate.pem 2>$D/openssl
    cat >$D/stunnel.conf <<END
foreground = yes
pid =
cert = $D/certificate.pem
key = $D/key.pem
[web]
accept = $A:$P
connect = $A:$B
END
    run stunnel $D/stunnel.conf
    "#;
    let client = r#"
    cat >$D/client.conf <<END
client = yes
foreground = yes
pid =
[web]
accept = 127.0.0.1:$((P + 1))
connect = $A:$P
END
    run stunnel $D/client.conf
    await_port $((P + 1))
    fetch() { curl -sS --fail http://127.0.0.1:$((P + 1))/$1; }
    "#;
    Script {
        name: "stunnel at both ends",
        needs: &["nginx", "stunnel", "openssl", "curl"],
        server: &|place| before_nginx(place, start),
        client: &format!("{client}{FILES}"),
        count: times(3, 30),
        // Each end consists of programs connected to each other.
        carried: Carried::Any,
    }
    .run(&net);
}

/// A cache: one process starts another, which has the threads.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn varnish() {
    let net = Net::new();
    let start = r#"
    cat >$D/varnish.vcl <<END
vcl 4.1;
backend default { .host = "$A"; .port = "$B"; }
END
    run varnishd -j none -F -n $D/varnish -a $A:$P -f $D/varnish.vcl -s malloc,100m
    "#;
    Script {
        name: "Varnish",
        needs: &["nginx", "varnishd", "curl"],
        server: &|place| before_nginx(place, start),
        client: &format!("fetch() {{ curl -sS --fail http://$A:$P/$1; }}\n{FILES}"),
        count: times(3, 30),
        carried: Carried::Server,
    }
    .run(&net);
}

/// A proxy, asked for pages of another server, and by CONNECT for a tunnel.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn squid() {
    let net = Net::new();
    let start = r#"
    cat >$D/squid.conf <<END
http_port $A:$P
http_access allow all
cache deny all
access_log none
cache_log /dev/null
pid_filename none
coredump_dir $D
shutdown_lifetime 0 seconds
END
    echo $B >$D/behind
    run squid -N -n test$P -f $D/squid.conf
    "#;
    let client = r#"
    fetch() {
        curl -sS --fail -x http://$A:$P http://$A:$(cat $D/behind)/$1 >$D/plain
        curl -sS --fail --proxytunnel -x http://$A:$P http://$A:$(cat $D/behind)/$1 >$D/through
        cmp $D/plain $D/through
        cat $D/plain
    }
    "#;
    Script {
        name: "Squid",
        needs: &["nginx", "squid", "curl"],
        server: &|place| before_nginx(place, start),
        client: &format!("{client}{FILES}"),
        count: times(3, 30),
        carried: Carried::Server,
    }
    .run(&net);
}
