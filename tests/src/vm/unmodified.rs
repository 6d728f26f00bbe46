// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs of the distribution in guests, with and without SMC.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::Value;

use super::{Bed, Guest, Job, Run, Vm};

/// Two guests with the programs and so many ISM devices each. `None`: the programs are not there.
pub fn guests(bed: &Bed, devices: usize) -> Option<[Guest; 2]> {
    if !Vm::has_programs() {
        return None;
    }
    let vm = |name| {
        let pages = 32 * devices;
        let vm = Vm::named(name).programs().mem("1G").append(&format!("ism.hugepages={pages}"));
        (1..devices).fold(vm, |vm, _| vm.another_ism())
    };
    Some(bed.boot(["a", "b"].map(vm)))
}

/// The command line of a program, on SMC if `smc`.
pub fn on(smc: bool, program: &str) -> String {
    if smc { format!("smc run --strict {program}") } else { program.to_owned() }
}

/// Starts a server and waits for its listening port, the value of `PORT` in its command line.
pub fn serve(guest: &Guest, command: &str, port: u16) -> Job {
    let command = Run::from(format!("exec {}", command.replace("PORT", &port.to_string())));
    let job = guest.spawn(command.within(Duration::from_secs(1200)));
    // A connection would be one too many for some.
    let ready = format!(
        "n=0; until grep -qi ':{port:04x} .* 0A ' /proc/net/tcp /proc/net/tcp6; do \
                         n=$((n+1)); [ $n -lt 300 ] || exit 1; sleep 0.1; done"
    );
    guest.ok(ready);
    job
}

/// The directory served by [`web_server`].
pub const WEB_ROOT: &str = "/tmp/www";

/// Prepares nginx with so many workers in a guest for these ports. Returns the command line for a
/// start on one of the ports.
pub fn web_server(guest: &Guest, workers: u32, ports: RangeInclusive<u16>) -> &'static str {
    let (address, first, last) = (guest.ip(), ports.start(), ports.end());
    guest.ok(format!(
        "mkdir -p {WEB_ROOT} /var/log/nginx /var/lib/nginx && cat > /tmp/nginx.conf <<'END'\n\
         user root; daemon off; worker_processes {workers}; pid /tmp/nginx.LISTEN.pid;\n\
         error_log /tmp/nginx.log; events {{}}\n\
         http {{ access_log off; keepalive_requests 1000000;\n\
         server {{ listen {address}:LISTEN; root {WEB_ROOT}; }} }}\nEND\n\
         for port in $(seq {first} {last}); do \
         sed s/LISTEN/$port/ /tmp/nginx.conf > /tmp/nginx.$port; done"
    ));
    "nginx -c /tmp/nginx.PORT"
}

/// The processes in a guest's `smc stat`.
pub fn stat(guest: &Guest) -> Vec<Value> {
    // The command fails without any process on SMC.
    let text = guest.ok("smc stat --json || echo '{}'");
    let all: Value = serde_json::from_str(&text).unwrap_or_default();
    all["processes"].as_array().cloned().unwrap_or_default()
}

/// Connections over SMC-D of a guest's living processes, past ones included.
pub fn smc_d(guest: &Guest) -> u64 {
    stat(guest).iter().filter_map(|process| process["totals"]["smc_d"].as_u64()).sum()
}

/// The number after a word of a program's output.
///
/// # Panics
/// There is none.
pub fn after(text: &str, word: &str) -> f64 {
    let rest = text.split(word).nth(1).unwrap_or_default();
    let number = rest.split(|c: char| !c.is_ascii_digit() && c != '.').find(|n| !n.is_empty());
    number.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no {word:?} in {text}"))
}
