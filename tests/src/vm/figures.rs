// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! AF_SMC next to TCP, between two guests: the measurements of `interop`, several times in turn.

use super::ends::{Commands, End, connection_on};

/// Kinds of sockets, and their carriers.
const SIDES: [(&str, &str); 2] = [("linux", "smc-d"), ("tcp", "tcp")];

/// Measured sizes of send and receive buffers, bytes: Linux's default, and sixteen times as much.
pub const BUFFERS: [&str; 2] = ["65536", "1048576"];

/// Gives AF_SMC's connections of a guest send and receive buffers of so many bytes.
#[track_caller]
pub fn set_buffers(guest: &impl Commands, bytes: &str) {
    for name in ["rmem", "wmem"] {
        guest.start(["smc-test-peer", "linux", "set", name, bytes].into()).wait().ok();
    }
}

/// Measures `orders` between a server and a client, `runs` times on AF_SMC and on TCP in turn, and
/// prints a line for each: medians of both and of their ratios, with the smallest and the largest.
///
/// The first word of the order's note is the figure.
#[track_caller]
pub fn af_smc_next_to_tcp(
    [server, client]: [&impl Commands; 2],
    address: &str,
    orders: &[(&str, &str)],
    runs: usize,
) {
    let mut figures = vec![[vec![], vec![]]; orders.len()];
    for _ in 0..runs {
        for (side, (who, kind)) in SIDES.into_iter().enumerate() {
            let mut there = End::serve(server, who);
            let mut here = End::talk(client, who, address);
            // The first connections to a peer make buffers and a link group.
            for order in ["ping 1000 1", "ping 1000 2"] {
                connection_on(kind, &mut there, &mut here, order);
            }
            for ((_, order), figures) in orders.iter().zip(&mut figures) {
                figures[side].push(figure(&mut here, order, kind));
            }
            there.kill();
            here.kill();
        }
    }
    for ((what, order), [smc, tcp]) in orders.iter().zip(&mut figures) {
        let mut ratios: Vec<f64> = smc.iter().zip(&*tcp).map(|(smc, tcp)| smc / tcp).collect();
        let [smc, tcp, ratios] = [smc, tcp, &mut ratios].map(|all| text(all));
        println!("{what} ({order}): SMC-D {smc}, TCP {tcp}, ratio {ratios}");
    }
}

/// The client's figure for an order. The server's reports stay unread, as the server is killed.
#[track_caller]
fn figure(client: &mut End, order: &str, kind: &str) -> f64 {
    client.order(order);
    let report = client.report();
    assert_eq!((report.error.as_str(), report.carrier.kind.as_str()), ("", kind), "{order}");
    let figure = report.note.split(' ').next().and_then(|word| word.parse().ok());
    figure.unwrap_or_else(|| panic!("{order}: no figure: {}", report.note))
}

fn text(all: &mut [f64]) -> String {
    all.sort_unstable_by(f64::total_cmp);
    match &*all {
        [] => "none".to_owned(),
        [low, .., high] => format!("{:.2} [{low:.2}..{high:.2}]", all[all.len() / 2]),
        [one] => format!("{one:.2}"),
    }
}
